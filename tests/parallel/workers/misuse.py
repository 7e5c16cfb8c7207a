"""What a user may get wrong in the call, in any framework: calls and the words that the answer must have."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_lhc import ConfigError

__all__ = ["DIFFERENT_SIZES", "check_different_sizes", "check_wrong_options", "check_wrong_values_of_compression", "expect"]

#: Elements of two ranks' tensors: one below min_numel and one above, both above, and how often all ranks reduce one of
#: 50,000 before that.
DIFFERENT_SIZES = [(500, 50_000, 0), (500, 50_000, 4), (50_000, 60_000, 0), (50_000, 60_000, 4)]


def expect(call: Callable[[], Any], *words: str) -> None:
    """The call raises ``ConfigError`` with these words in it."""
    message, result = "", None
    try:
        result = call()
    except ConfigError as error:
        message = str(error)
    assert message, f"no ConfigError with {words}, but {result!r}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message}"


def check_wrong_options(lhc: Any) -> None:
    """``LHC(...)`` with options that it hasn't, or hasn't so."""
    expect(lambda: lhc(4), "LHC(4)", "by name", "min_numel=")
    expect(lambda: lhc(4, "lossless"), "LHC(4, 'lossless')", "by name")
    expect(lambda: lhc(ratio=4), "no option 'ratio'", "max_wire_ratio")
    expect(lambda: lhc(min_numels=4), "no option 'min_numels'", "Did you mean min_numel?")
    expect(lambda: lhc(min_numel="1"), "min_numel", "'1'", "whole number", "LHC(min_numel=16384)")
    expect(lambda: lhc(process_set=[0, 1]), "process_set", "[0, 1]", "hvd.ProcessSet")
    expect(lambda: lhc(process_set=0), "process_set", "hvd.ProcessSet")


def check_wrong_values_of_compression(lhc: Any, compression: Any, reduce: Callable[[Any], Any]) -> None:
    """``compression=`` something that is no compressor but stands near one.

    Args:
        lhc: the class ``LHC``.
        compression: the class ``Compression``.
        reduce: calls Horovod with what it is given as ``compression=``.
    """
    expect(lambda: reduce(lhc), "LHC()", "Compression.lhc")
    expect(lambda: reduce(compression), "compression=Compression.lhc")
    expect(lambda: reduce(compression()), "compression=Compression.lhc")

    class Mine(lhc):  # type: ignore[misc]
        def compress(self, tensor: Any) -> Any:
            """As a subclass may call it."""
            return lhc.compress(self, tensor)

    reduce(Mine())


def check_different_sizes(rank: int, mine: int, reduce: Callable[[Any], Any]) -> None:
    """Ranks that hand in tensors of different sizes: each gets an error, and reads of shapes below it; nobody waits.

    Args:
        rank: of the caller.
        mine: elements of its tensor.
        reduce: reduces a float32 array.
    """
    printed = io.StringIO()
    try:
        reduce(sparse(mine))
    except Exception as error:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    assert "the ranks handed in tensors of different shapes" in printed.getvalue(), (rank, mine, printed.getvalue())


def sparse(numel: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An array with twenty ones."""
    array = np.zeros(numel, np.float32)
    array[:: numel // 20] = 1
    return array
