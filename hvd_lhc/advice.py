"""What Horovod says of tensors that don't match is put into the user's terms, below the traceback that ends the program.

Where ranks hand in different shapes, Horovod compares what was sent: a tensor of float32 with a sketch of float64, or two
sketches of different size. It raises that by itself, in a function that the user called, or out of a traced graph: there is
nothing of ours to raise something else. So an uncaught exception gets a few lines more.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["note_shape"]

#: Horovod's words for tensors of one name that differ between ranks.
_MISMATCH = re.compile(r"Mismatched (data types|\w+ tensor shapes)")

_last_shape: Any = None
_excepthook: Any = None  # that stood before ours


def note_shape(shape: Any) -> None:
    """Remember the shape of a tensor that is being compressed, the last of which may be the one that doesn't match."""
    global _last_shape, _excepthook
    _last_shape = shape
    if _excepthook is None:
        _excepthook, sys.excepthook = sys.excepthook, _explain


def _explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """An ``excepthook`` that adds what a mismatch means if gradients are compressed."""
    _excepthook(kind, error, traceback)
    if _MISMATCH.search(str(error)) and sys.stderr is not None:
        print(
            "hvd_lhc: most likely the ranks handed in tensors of different shapes, or in another order. What Horovod compares "
            "above may be their sketches (float64, of another size than the tensors), or a sketch and a tensor that has fewer "
            "than min_numel elements and goes as it is. The last tensor that this rank gave to compress had the shape "
            f"{_words(_last_shape)}; compare that of the other ranks, and see that they have the same min_numel.",
            file=sys.stderr,
        )


def _words(shape: Any) -> str:
    """As Horovod writes shapes; a dimension that wasn't known when a function was traced is ``None``."""
    try:
        return str(list(shape))
    except ValueError:
        return "that TensorFlow didn't know when it traced a function"
