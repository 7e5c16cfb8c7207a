"""The compressor for TensorFlow: gradients to wires and back, eagerly or inside a ``tf.function``.

In a graph a tensor's dtype is static but its size need not be, so every wire is float64, of unknown length. A tensor that
goes dense sends a header alone, and is reduced in ``decompress``.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Hashable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compressor
from tensorflow.python.ops import control_flow_util

from hvd_lhc.advice import note_shape
from hvd_lhc.arguments import check_process_set, describe, method_of_an_instance, options_by_name
from hvd_lhc.compressor import Engine, Outcome, Phase, Statistics, Ticket
from hvd_lhc.errors import ConfigError, DecodeError, UnsupportedError
from hvd_lhc.participants import subsets_of
from hvd_lhc.refusals import refuse_operation
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor
from hvd_lhc.tensorflow.call_sites import CallSites, is_nested
from hvd_lhc.tensorflow.caller import dense_options, is_in_a_group, no_sum
from hvd_lhc.tensorflow.keras_guard import refuse_broken_keras

__all__ = ["LHC"]

#: dtype -> what it is reduced in on the dense path. Horovod can't reduce bfloat16.
_DENSE_DTYPES = {tf.float32: tf.float32, tf.float16: tf.float16, tf.bfloat16: tf.float32}
#: The number of a tensor without elements, which has no ticket.
_EMPTY = -1


class LHC(Compressor):  # type: ignore[misc]
    """Lossless homomorphic compression: pass an instance as ``compression=``.

    For ``hvd.DistributedGradientTape``, ``hvd.allreduce`` and ``hvd.DistributedOptimizer`` (of Keras: with ``tf_keras``).
    float32, float16 and bfloat16 tensors are compressed where that pays; everything else passes through untouched.
    ``tf.IndexedSlices`` reach a compressor only with ``sparse_as_dense=True``.

    Args:
        min_numel: smaller tensors are never compressed.
        precision: ``"lossless"``, or ``"bounded"``: each rank's elements are rounded, by at most 2**-40 (with up to 8
            ranks) of the largest element of the last steps; see docs/planner.md.
        max_wire_ratio: compress only where the wire has at most this share of the dense bytes.
        reprobe_steps: how often a tensor that goes dense is looked at again.
        fallback: ``"dense"``, or ``"error"`` to raise ``DecodeError`` when a sketch can't be verified.
        process_set: the ranks that reduce; the same object as given to Horovod. Default: all.

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
        self._call_sites = CallSites()
        self.reset()

    def reset(self) -> None:
        """Forget what was learned from earlier steps, not the statistics. Call it on all ranks between two steps, or on none.

        Needed where ranks that have steps behind them meet ranks that have not, as in an elastic job:
        ``state.register_reset_callbacks([lhc.reset])``.
        """
        self._phases: dict[Hashable, Phase] = {}

    @property
    def statistics(self) -> Statistics:
        """What went over the wire on this rank since the start."""
        return self._engine.statistics

    @method_of_an_instance
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to reduce instead of ``tensor``, and the context for :meth:`decompress`.

        Raises:
            UnsupportedError: Horovod is about to do something else than a sum or an average, or XLA compiles the function.
            ConfigError: ``tensor`` is none of TensorFlow's.
        """
        if not tf.is_tensor(tensor) or isinstance(tensor, tf.IndexedSlices):
            raise ConfigError(
                f"compression for TensorFlow takes a tf.Tensor or a tf.Variable, not {describe(tensor)}: write "
                "tf.convert_to_tensor(...); for a tensor of PyTorch use hvd_lhc.torch.Compression.lhc"
            )
        note_shape(tensor.shape)
        wire, context = self._compress(tensor)
        return wire if tf.executing_eagerly() else _named_after(tensor, wire), context

    def _compress(self, tensor: Any) -> tuple[Any, Any]:
        numel = tensor.shape.num_elements()
        if tensor.dtype not in _DENSE_DTYPES or (self._ranks().size() < 2 and not _is_elastic()):
            return tensor, None
        if numel is not None and numel < self._settings.min_numel and tensor.dtype != tf.bfloat16 and not is_in_a_group():
            return tensor, None
        refuse_operation(no_sum(), tensor.shape)
        eager = tf.executing_eagerly()
        if not eager and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise UnsupportedError(
                f"a gradient of shape {tensor.shape} is to be compressed within a function of jit_compile=True, which XLA can't "
                "compile. Take jit_compile=True off the function that reduces gradients (with Keras: "
                "model.compile(jit_compile=False)), or use compression=Compression.none."
            )
        label = None if eager else self._call_sites.next_label()
        site = _Site(self, tensor.dtype, label)
        flat = tf.reshape(tf.cast(tensor, tf.float32), [-1])
        if eager:
            wire, number = site.encode(flat.numpy(), tensor.shape.as_list())
            return tf.constant(wire), (site, number, tensor)
        wire, number = _call(site.encode, [flat, tf.shape(tensor)], [tf.float64, tf.int64])
        wire.set_shape([None])
        return wire, (site, number, tensor)

    @method_of_an_instance
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The reduced gradient, with the dtype and static shape of what ``compress`` was given."""
        if ctx is None:
            return tensor
        site, number, gradient = ctx
        options = dense_options(tensor)
        if tf.executing_eagerly():
            if number == _EMPTY:
                return gradient
            outcome = site.finish(tensor.numpy(), number)
            if outcome.decoded is None:
                return site.reduce_dense(gradient, options, outcome.header.factor, outcome.dense_name)
            values = tf.constant(outcome.decoded.values)
            return tf.cast(tf.reshape(values, gradient.shape), gradient.dtype)
        values, is_decoded, factor = _call(site.decode, [tensor, number], [tf.float32, tf.bool, tf.float64])
        values.set_shape([None])
        is_decoded.set_shape([])
        factor.set_shape([])
        name, ignore_name_scope = _name_of_reduction(tensor)
        result = tf.cond(
            is_decoded,
            lambda: tf.cast(tf.reshape(values, tf.shape(gradient)), gradient.dtype),
            lambda: site.reduce_dense(gradient, options, factor, f"hvd_lhc.dense.{name}", ignore_name_scope),
        )
        result.set_shape(gradient.shape)
        return result

    def _ranks(self) -> Any:
        return hvd.global_process_set if self._process_set is None else self._process_set

    def _process_sets(self) -> list[list[int]]:
        return subsets_of(self._ranks().ranks, mpi_ops._basics._get_process_set_ids_and_ranks().values())

    def __hash__(self) -> int:
        # Horovod keeps compressors as keys of a dictionary, and asks for the hash when an optimizer is made.
        refuse_broken_keras()
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._settings, "process_set": self._process_set}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings = state["settings"]
        self._process_set = state["process_set"]
        self._start_afresh()

    def __repr__(self) -> str:
        return f"LHC({self._settings})"


class _Site:
    """One place where a graph compresses a tensor; eagerly, one such object per call."""

    def __init__(self, lhc: LHC, dtype: Any, label: str | None) -> None:
        """Remember where this is.

        Args:
            lhc: the compressor.
            dtype: of the tensor.
            label: of the place; ``None`` eagerly, where all tensors of a shape share a plan.
        """
        self._lhc = lhc
        self._dtype = dtype
        self._label = label
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count()

    def encode(self, x: Any, shape: Any) -> tuple[Any, Any]:
        """Flat float32 gradient and its shape -> wire, number of its ticket."""
        if not x.size:
            return np.zeros(1), np.int64(_EMPTY)
        shape = tuple(int(n) for n in shape)
        tensor = Tensor(
            numel=int(x.size),
            row=math.prod(shape[1:]) if len(shape) > 1 else 1,
            element_bytes=_DENSE_DTYPES[self._dtype].size,
            top_exponent=16 if self._dtype == tf.float16 else 128,
        )
        engine, ranks = self._lhc._engine, self._lhc._ranks()
        key = self._label, shape, self._dtype.name
        phase = self._lhc._phases.setdefault(key, Phase())
        if self._label is not None and phase.is_under_way:  # the step before failed, or this place is run twice at a time
            phase.abandon()
            self._tickets.clear()
        ticket = engine.begin(phase, key, tensor, ranks.size(), header_always=True)
        assert ticket is not None  # header_always
        number = next(self._numbers)
        self._tickets[number] = ticket
        return engine.encode(ticket, x, ranks.rank()), np.int64(number)

    def finish(self, wire: Any, number: Any) -> Outcome:
        """Reduced wire and number of its ticket -> what it turned into."""
        ticket = self._tickets.pop(int(number), None)
        if ticket is None or not ticket.is_under_way:
            raise UnsupportedError(
                f"a tf.function that compresses gradients ({self._label}) ran twice at the same time, so that ranks can't agree "
                "on which of its runs came first. It is called twice by another tf.function, and was traced before that: make "
                "sure that the outer function is called first, or that the inner one is called once in a step."
            )
        try:
            return self._lhc._engine.finish(ticket, np.asarray(wire), self._dtype.name)
        except DecodeError:
            self._lhc.reset()  # whoever goes on after this has not seen the step's other wires on every rank
            raise

    def decode(self, wire: Any, number: Any) -> tuple[Any, Any, Any]:
        """The same for a graph: values (empty if not decoded), whether it was decoded, the factor of the reduction."""
        if number == _EMPTY:
            return np.empty(0, np.float32), np.bool_(True), np.float64(1)
        outcome = self.finish(wire, number)
        values = np.empty(0, np.float32) if outcome.decoded is None else outcome.decoded.values
        return values, np.bool_(outcome.decoded is not None), np.float64(outcome.header.factor)

    def reduce_dense(
        self, gradient: Any, options: dict[str, Any] | None, factor: Any, name: str, ignore_name_scope: bool = True
    ) -> Any:
        """Reduce the original gradient.

        Args:
            gradient: of this rank.
            options: how its wire was reduced; ``None`` if that is unknown.
            factor: what its wire was multiplied by, in that case; an intermediate result may overflow then.
            name: of the reduction.
            ignore_name_scope: without the scopes that stand around it.
        """
        dense = tf.cast(gradient, _DENSE_DTYPES[self._dtype])
        known = {"op": hvd.Sum} if options is None else options
        total = hvd.allreduce(
            dense, name=name, process_set=self._lhc._ranks(), ignore_name_scope=ignore_name_scope, **known
        )
        if options is None:
            total *= tf.cast(factor, total.dtype)
        return tf.cast(total, self._dtype)


def _is_elastic() -> bool:
    """Can the number of ranks change while a traced function is in use?"""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def _name_of_reduction(wire: Any) -> tuple[str, bool]:
    """What a reduced wire is called in a graph, and whether Horovod leaves out the scopes around that.

    Reductions have names that are equal on all ranks and differ from each other, either within their scopes or without them.
    """
    name = f"{wire.op.name.rsplit('/', 1)[-1]}.{wire.value_index}"
    return name, "ignore_name_scope" in wire.op.node_def.attr and bool(wire.op.get_attr("ignore_name_scope"))


def _named_after(tensor: Any, wire: Any) -> Any:
    """What is reduced instead of a graph's tensor, under a name that doesn't tell whether that is a sketch.

    Horovod makes the name of a reduction out of it and of the functions around, and has ranks wait for each other by that
    name. Where they have tensors of different shapes, one may send a sketch and another the tensor itself. TensorFlow's name
    for a call tells whether the function has state, as it has where it compresses; so it gets some anyway.
    """
    with tf.control_dependencies([_state()]):
        return tf.identity(wire, name=f"hvd_lhc_{tensor.name.rpartition('/')[2].partition(':')[0]}")


def _state() -> Any:
    """A tensor without elements that is never folded into a constant, and makes a function count as stateful."""
    return tf.raw_ops.RandomUniform(shape=[0], dtype=tf.float32, seed=1, seed2=1)


def _call(function: Callable[..., Any], inputs: list[Any], outputs: list[Any]) -> Any:
    """Call Python from a graph, once per step.

    A stateful call is put in order with all other stateful calls, so that tensors are reduced one after the other. That is
    needed in a function that may be called twice by another. Elsewhere the call is stateless, and may run at any time; it
    might be folded into a constant, which an input that is no constant prevents.
    """
    def without_guard(*arguments: Any) -> Any:
        return function(*arguments[:-1])

    return tf.numpy_function(without_guard, [*inputs, _state()], outputs, stateful=is_nested())
