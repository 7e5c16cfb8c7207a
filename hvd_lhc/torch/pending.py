"""Horovod's reductions that are under way: which have finished, and those that go beside others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

if TYPE_CHECKING:
    from hvd_lhc.torch.caller import Caller

__all__ = ["HeadersBeside", "PendingReductions"]

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


class HeadersBeside:
    """Reductions of headers whose gradients go the usual way at the same time. A tensor's has one name in all steps.

    A step may fail on this rank before every rank has sent its header: the reduction of the gradient is refused, for ranks
    have different shapes. Nobody collects the header then, and Horovod takes no second one of its name; so this one serves
    in the next step. It tells all ranks the same, if about an old gradient, and they plan by what it says only.
    """

    def __init__(self) -> None:
        self._started: dict[tuple[str, int], tuple[int, torch.Tensor]] = {}

    def start(self, header: torch.Tensor, caller: Caller, numel: int) -> int:
        """Start a reduction, or find the one that is still under way. Returns Horovod's handle.

        Args:
            header: of this rank's gradient.
            caller: of the gradient; it has a name.
            numel: elements of the gradient: headers of different sizes don't meet.
        """
        ranks = caller.process_set
        assert ranks is not None
        key = f"hvd_lhc.header.{caller.parameter}.{numel}", int(ranks.process_set_id)
        handle, sent = self._started.get(key, (-1, header))
        entry = getattr(mpi_ops, "_handle_map", {}).get(handle)
        if entry is not None and entry[0] is sent and not hvd.poll(handle):
            return handle
        started: int = hvd.allreduce_async(header, name=key[0], op=hvd.Sum, process_set=ranks)
        self._started[key] = started, header
        return started
