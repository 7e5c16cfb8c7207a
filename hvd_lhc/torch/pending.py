"""Which of Horovod's reductions have finished, without waiting for them."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

__all__ = ["PendingReductions"]

_PAUSE_SECONDS = 50e-6
_LONGEST_PAUSE_SECONDS = 2e-3


class PendingReductions:
    """Finds the reduction that a wire is part of, among those that Horovod keeps until they are synchronized.

    Horovod hands a compressor the tensor but never the handle. Its table of handles is internal, but has had the same
    form since 2018; where it has another, no wire is ever found, and retries are done one after the other.
    """

    def __init__(self) -> None:
        self._pause_seconds = _PAUSE_SECONDS

    def finished(self, wire: torch.Tensor) -> torch.Tensor | None:
        """The reduced array, if the reduction of ``wire`` has finished and nobody has collected it."""
        handles: dict[int, Any] = getattr(mpi_ops, "_handle_map", {})
        for handle, entry in list(handles.items()):
            inputs, outputs = entry
            if not isinstance(inputs, (list, tuple)):
                inputs, outputs = [inputs], [outputs]
            for sent, received in zip(inputs, outputs):
                if sent is wire:
                    return received if hvd.poll(handle) else None
        return None

    def pause(self) -> None:
        """Sleep a little, a little longer each time."""
        time.sleep(self._pause_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
