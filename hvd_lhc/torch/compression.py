"""The compressor for PyTorch: gradients to wires and back, between Horovod's two calls per tensor."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compressor

from hvd_lhc.advice import note_shape
from hvd_lhc.arguments import check_process_set, describe, method_of_an_instance, options_by_name
from hvd_lhc.compressor import Engine, Phase, Site, Statistics
from hvd_lhc.errors import ConfigError, DecodeError, UnsupportedError
from hvd_lhc.participants import subsets_of
from hvd_lhc.refusals import refuse_operation
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor
from hvd_lhc.torch.caller import Call, Caller, caller_of, find_call
from hvd_lhc.torch.contexts import Dense, Sketch, Watched
from hvd_lhc.torch.pending import HeadersBeside, PendingReductions

__all__ = ["LHC"]

#: dtype -> its name in the codec, and what it is reduced in on the dense path. Horovod can't reduce bfloat16; float32 holds
#: a sum of two of them exactly enough that rounding twice gives what rounding once would.
_DTYPES = {
    torch.float32: ("float32", torch.float32),
    torch.float16: ("float16", torch.float16),
    torch.bfloat16: ("bfloat16", torch.float32),
}

#: Of all compressors: names are Horovod's own.
_headers = HeadersBeside()


@dataclass(frozen=True)
class _Place:
    """What stays the same from step to step for the tensors of one site.

    Attributes:
        phase, site: where the tensors belong.
        caller: what Horovod is going to do with their wires.
        size, dtype: of the tensors.
    """

    phase: Phase
    site: Site
    caller: Caller
    size: torch.Size
    dtype: torch.dtype


@dataclass
class _Owned:
    """What belongs to an optimizer: a phase, and places by the names of parameters."""

    phase: Phase
    places: dict[str, _Place]


class LHC(Compressor):  # type: ignore[misc]
    """Lossless homomorphic compression: pass an instance as ``compression=``.

    float32, float16 and bfloat16 gradients are compressed where that pays; everything else passes through untouched.
    The result of a compressed tensor is the exact sum of the ranks' gradients (divided by their number with
    ``op=Average``), rounded once. A step in which a tensor can't be verified, or holds NaN or infinity, is reduced dense
    for that tensor, as without compression.

    Args:
        min_numel: smaller tensors are never compressed.
        precision: ``"lossless"``, or ``"bounded"``: each rank's elements are rounded, by at most 2**-40 (with up to 8
            ranks) of the largest element of the last steps; see docs/planner.md.
        max_wire_ratio: compress only where the wire has at most this share of the dense bytes.
        reprobe_steps: how often a tensor that goes dense is looked at again.
        fallback: ``"dense"``, or ``"error"`` to raise ``DecodeError`` when a sketch can't be verified.
        process_set: the ranks that reduce; the same object as given to ``DistributedOptimizer``. Default: all.

    Raises:
        ConfigError: an option is out of range, unknown, or not given by name.
    """

    @options_by_name
    def __init__(
        self,
        *,
        min_numel: int = Settings.min_numel,
        precision: str = Settings.precision,
        max_wire_ratio: float = Settings.max_wire_ratio,
        reprobe_steps: int = Settings.reprobe_steps,
        fallback: str = Settings.fallback,
        process_set: Any = None,
    ) -> None:
        self._settings = Settings(min_numel, precision, max_wire_ratio, reprobe_steps, fallback)
        check_process_set(process_set)
        self._process_set = process_set
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._engine = Engine(self._settings, self._process_sets)
        self._has_warned = False
        self.reset()

    def reset(self) -> None:
        """Forget what was learned from earlier steps, not the statistics. Call it on all ranks between two steps, or on none.

        Needed where ranks that have steps behind them meet ranks that have not. When Horovod is initialized anew (an elastic
        job does that when ranks come or go) it happens by itself.
        """
        self._handles = getattr(mpi_ops, "_handle_map", None)  # another object after each hvd.init()
        self._direct = Phase()  # of calls by hand
        self._owned: weakref.WeakKeyDictionary[Any, _Owned] = weakref.WeakKeyDictionary()  # by each optimizer
        self._under_way: weakref.WeakSet[Sketch] = weakref.WeakSet()

    @property
    def statistics(self) -> Statistics:
        """What went over the wire on this rank since the start."""
        return self._engine.statistics

    @method_of_an_instance
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The array to reduce instead of ``tensor``, and the context for :meth:`decompress`.

        ``tensor`` is not modified, and is kept until ``decompress`` in case it has to be reduced dense.

        Raises:
            UnsupportedError: Horovod is about to do something else than a sum or an average.
            ConfigError: ``tensor`` is none of PyTorch's.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"compression for PyTorch takes a torch.Tensor, not {describe(tensor)}: write torch.from_numpy(...) or "
                "torch.as_tensor(...); for a tensor of TensorFlow use hvd_lhc.tensorflow.Compression.lhc"
            )
        note_shape(tensor.shape)
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or _needs_autograd(tensor):
            return tensor, None
        call = find_call()
        if call.no_sum and tensor.numel() >= self._settings.min_numel:
            refuse_operation(call.no_sum, tensor.shape)
        place = self._place(call, tensor)
        ticket = self._engine.begin_at(place.phase, place.site)
        dense_dtype = _DTYPES[tensor.dtype][1]
        if ticket is None:
            if dense_dtype == tensor.dtype:
                return tensor.contiguous(), None  # Horovod takes no other
            return tensor.to(dense_dtype).contiguous(), Dense(tensor.dtype)
        gradient = tensor.detach()
        x = gradient if ticket.plan.numel == tensor.numel() else gradient.reshape(-1)[: ticket.plan.numel]
        x = x.to("cpu", torch.float32).contiguous().view(-1)
        wire = torch.from_numpy(self._engine.encode(ticket, x.numpy(), self._ranks().rank()))
        if ticket.kind != "sketch" and place.caller.has_names:
            handle = _headers.start(wire, place.caller, tensor.numel())
            return tensor.to(dense_dtype).contiguous(), Watched(tensor.dtype, ticket, handle)
        wire = wire.to(tensor.device)
        sketch = Sketch(gradient, wire, ticket, place.caller.options, call.parameter)
        if call.parameter and not ticket.negative_zeros and _shares_memory(x, gradient):
            sketch.in_place = x
        self._under_way.add(sketch)
        return wire, sketch

    @method_of_an_instance
    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced gradient, with the dtype, shape and device of what ``compress`` was given.

        Raises:
            UnsupportedError: the reduction was not Sum or Average over the compressor's process set.
            DecodeError: not verified, and ``fallback="error"``.
        """
        if ctx is None:
            return tensor
        if isinstance(ctx, Dense):
            return tensor.to(ctx.dtype)
        if isinstance(ctx, Watched):
            self._engine.finish(ctx.ticket, hvd.synchronize(ctx.handle).numpy(), _DTYPES[ctx.dtype][0])
            return tensor.to(ctx.dtype)
        sketch: Sketch = ctx
        if sketch.is_outdated and not self._has_warned:
            self._has_warned = True
            sketch.warn_of_late_change()
        if sketch.outcome is None and sketch.failure is None:
            self._decode(sketch, tensor)
        self._under_way.discard(sketch)
        if sketch.failure is not None:
            # Whoever catches this and goes on has not seen all wires of the step on every rank.
            self.reset()
            raise sketch.failure
        if sketch.retry is not None:
            return self._await_retry(sketch)
        assert sketch.outcome is not None and sketch.outcome.decoded is not None
        if sketch.in_place is not None and sketch.outcome.decoded.values.ctypes.data == sketch.gradient.data_ptr():
            return sketch.gradient
        values = torch.from_numpy(sketch.outcome.decoded.values).view(sketch.gradient.shape)
        return values.to(sketch.gradient.device, sketch.gradient.dtype)

    def _decode(self, sketch: Sketch, wire: torch.Tensor) -> None:
        """Decode a reduced wire; where that fails, start the dense reduction without waiting for it."""
        array = wire.detach().cpu().numpy()
        name, dense_dtype = _DTYPES[sketch.gradient.dtype]
        try:
            sketch.outcome = self._engine.finish(sketch.ticket, array, name, sketch.output())
        except (DecodeError, UnsupportedError) as error:
            sketch.failure = error
            return
        if sketch.outcome.decoded is not None:
            return
        header = sketch.outcome.header
        options = sketch.options
        if options is None:  # as the wire was scaled, but after the sum; an intermediate result may overflow then
            op = hvd.Average if header.scale == "average" else hvd.Sum
            options = {"op": op, "postscale_factor": header.factor if header.scale == "other" else 1.0}
        sketch.retry = hvd.allreduce_async(
            sketch.gradient.to(dense_dtype).contiguous(),
            name=sketch.outcome.dense_name,
            process_set=self._ranks(),
            **options,
        )

    def _await_retry(self, sketch: Sketch) -> torch.Tensor:
        """Wait for a dense reduction, and meanwhile start those of the step's other tensors.

        Ranks may come here with different tensors first (hooks fire in different order), so waiting for one without
        starting the others would be waiting for each other.
        """
        assert sketch.retry is not None
        pending = PendingReductions()
        while not hvd.poll(sketch.retry):
            finished = [
                (other, wire)
                for other in self._under_way
                if other.outcome is None
                and other.failure is None
                and other.ticket.phase is sketch.ticket.phase
                and (wire := pending.finished(other.wire)) is not None
            ]
            for other, wire in finished:
                self._decode(other, wire)  # if the reduction failed, this does too, but Horovod says so first
            if not finished:
                pending.pause()
        total: torch.Tensor = hvd.synchronize(sketch.retry)
        return total.to(sketch.gradient.dtype)

    def _place(self, call: Call, tensor: torch.Tensor) -> _Place:
        """Where a tensor belongs: into the phase of its optimizer, with all of that one's tensors."""
        if getattr(mpi_ops, "_handle_map", None) is not self._handles:
            self.reset()
        if call.optimizer is None:
            return self._new_place(self._direct, caller_of(call), tensor)
        owned = self._owned.get(call.optimizer)
        if owned is None:
            owned = self._owned[call.optimizer] = _Owned(Phase(), {})
        place = owned.places.get(call.parameter)
        if place is None or place.size != tensor.shape or place.dtype != tensor.dtype:
            place = self._new_place(owned.phase, caller_of(call), tensor)
            owned.places[call.parameter] = place
        return place

    def _new_place(self, phase: Phase, caller: Caller, tensor: torch.Tensor) -> _Place:
        name, dense_dtype = _DTYPES[tensor.dtype]
        shape = Tensor(
            numel=tensor.numel(),
            row=tensor[0].numel() if tensor.dim() > 1 and len(tensor) else 1,
            element_bytes=dense_dtype.itemsize,
            top_exponent=16 if tensor.dtype == torch.float16 else 128,
        )
        key = caller.parameter, tuple(tensor.shape), name
        site = self._engine.site(phase, key, shape, self._ranks().size())
        return _Place(phase, site, caller, tensor.shape, tensor.dtype)

    def _ranks(self) -> Any:
        return hvd.global_process_set if self._process_set is None else self._process_set

    def _process_sets(self) -> list[list[int]]:
        return subsets_of(self._ranks().ranks, mpi_ops._basics._get_process_set_ids_and_ranks().values())

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._settings, "process_set": self._process_set}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings = state["settings"]
        self._process_set = state["process_set"]
        self._start_afresh()

    def __repr__(self) -> str:
        return f"LHC({self._settings})"


def _shares_memory(x: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Is a contiguous float32 array on the host the gradient itself, and no copy of it?"""
    return gradient.numel() == x.numel() and gradient.data_ptr() == x.data_ptr()


def _needs_autograd(tensor: torch.Tensor) -> bool:
    """A sketch has no derivative; a tensor that is part of a graph is reduced as it is."""
    return tensor.requires_grad and torch.is_grad_enabled()
