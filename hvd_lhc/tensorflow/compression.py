"""The compressor for TensorFlow: gradients to wires and back, eagerly or inside a ``tf.function``.

In a graph a tensor's dtype is static but its size need not be, so every wire is float64, of unknown length. A tensor that
goes dense sends a header alone, and is reduced in ``decompress``.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compressor
from tensorflow.python.ops import control_flow_util

from hvd_lhc.compressor import Engine, Outcome, Statistics, Ticket
from hvd_lhc.errors import UnsupportedError
from hvd_lhc.participants import subsets_of
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor
from hvd_lhc.tensorflow.keras_guard import refuse_broken_keras

__all__ = ["LHC"]

#: dtype -> what it is reduced in on the dense path. Horovod can't reduce bfloat16.
_DENSE_DTYPES = {tf.float32: tf.float32, tf.float16: tf.float16, tf.bfloat16: tf.float32}
#: What ``_Site.decode`` tells the graph to do.
_DECODED, _DENSE_SUM, _DENSE_AVERAGE, _DENSE_OTHER = range(4)
#: How far Horovod's function may be up the stack, with AutoGraph in between.
_FRAMES_TO_LOOK_AT = 24
#: The number of a tensor without elements, which has no ticket.
_EMPTY = -1


class LHC(Compressor):  # type: ignore[misc]
    """Lossless homomorphic compression: pass an instance as ``compression=``.

    For ``hvd.DistributedGradientTape``, ``hvd.allreduce`` and ``hvd.DistributedOptimizer`` (of Keras: with ``tf_keras``).
    float32, float16 and bfloat16 tensors are compressed where that pays; everything else passes through untouched.
    ``tf.IndexedSlices`` reach a compressor only with ``sparse_as_dense=True``.

    Args:
        min_numel: smaller tensors are never compressed.
        precision: ``"lossless"``, or ``"bounded"``: elements are rounded to a unit of at most 2**-40 of the
            largest element, so that one value lane always does.
        max_wire_ratio: compress only where the wire has at most this share of the dense bytes.
        reprobe_steps: how often a tensor that goes dense is looked at again.
        fallback: ``"dense"``, or ``"error"`` to raise ``DecodeError`` when a sketch can't be verified.
        process_set: the ranks that reduce; the same object as given to Horovod. Default: all.

    Raises:
        ConfigError: an option is out of range.
    """

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
        self._process_set = process_set
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._engine = Engine(self._settings, self._process_sets)
        self._call_sites = itertools.count()

    @property
    def statistics(self) -> Statistics:
        """What went over the wire on this rank since the start."""
        return self._engine.statistics

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to reduce instead of ``tensor``, and the context for :meth:`decompress`."""
        numel = tensor.shape.num_elements()
        if tensor.dtype not in _DENSE_DTYPES or self._ranks().size() < 2:
            return tensor, None
        if numel is not None and numel < self._settings.min_numel and tensor.dtype != tf.bfloat16 and not _is_in_a_group():
            return tensor, None
        eager = tf.executing_eagerly()
        if not eager and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise UnsupportedError(
                f"a gradient of shape {tensor.shape} is to be compressed within a function of jit_compile=True, which XLA can't "
                "compile. Take jit_compile=True off the function that reduces gradients (with Keras: "
                "model.compile(jit_compile=False)), or use compression=Compression.none."
            )
        site = _Site(self._engine, self._ranks(), tensor.dtype, "eager" if eager else next(self._call_sites))
        flat = tf.reshape(tf.cast(tensor, tf.float32), [-1])
        if eager:
            wire, number = site.encode(flat.numpy(), tensor.shape.as_list())
            return tf.constant(wire), (site, number, tensor)
        wire, number = _call(site.encode, [flat, tf.shape(tensor)], [tf.float64, tf.int64])
        wire.set_shape([None])
        return wire, (site, number, tensor)

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The reduced gradient, with the dtype and static shape of what ``compress`` was given."""
        if ctx is None:
            return tensor
        site, number, gradient = ctx
        if tf.executing_eagerly():
            if number == _EMPTY:
                return gradient
            outcome = site.finish(tensor.numpy(), number)
            if outcome.decoded is None:
                return site.reduce_dense(_action_of(outcome), gradient, outcome.header.factor, outcome.dense_name)
            values = tf.constant(outcome.decoded.values)
            return tf.cast(tf.reshape(values, gradient.shape), gradient.dtype)
        values, action, factor = _call(site.decode, [tensor, number], [tf.float32, tf.int32, tf.float64])
        values.set_shape([None])
        action.set_shape([])
        factor.set_shape([])

        name, ignore_name_scope = _name_of_reduction(tensor)

        def dense(kind: int) -> Callable[[], Any]:
            return lambda: site.reduce_dense(kind, gradient, factor, f"hvd_lhc.dense.{name}.{kind}", ignore_name_scope)

        def decoded() -> Any:
            return tf.cast(tf.reshape(values, tf.shape(gradient)), gradient.dtype)

        result = tf.switch_case(action, [decoded, dense(_DENSE_SUM), dense(_DENSE_AVERAGE), dense(_DENSE_OTHER)])
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
    """One place where a graph compresses a tensor; eagerly, one such object per call, all with the same label."""

    def __init__(self, engine: Engine, ranks: Any, dtype: Any, label: Any) -> None:
        self.label = label
        self._engine = engine
        self._ranks = ranks
        self._dtype = dtype
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
        ticket = self._engine.begin((self.label, shape, self._dtype.name), tensor, self._ranks.size(), header_always=True)
        assert ticket is not None  # header_always
        number = next(self._numbers)
        self._tickets[number] = ticket
        return self._engine.encode(ticket, x, self._ranks.rank()), np.int64(number)

    def finish(self, wire: Any, number: Any) -> Outcome:
        """Reduced wire and number of its ticket -> what it turned into."""
        return self._engine.finish(self._tickets.pop(int(number)), np.asarray(wire), self._dtype.name)

    def decode(self, wire: Any, number: Any) -> tuple[Any, Any, Any]:
        """The same for a graph: values (empty if not decoded), what to do, the factor of the reduction."""
        if number == _EMPTY:
            return np.empty(0, np.float32), np.int32(_DECODED), np.float64(1)
        outcome = self.finish(wire, number)
        values = np.empty(0, np.float32) if outcome.decoded is None else outcome.decoded.values
        return values, np.int32(_action_of(outcome)), np.float64(outcome.header.factor)

    def reduce_dense(self, action: int, gradient: Any, factor: Any, name: str, ignore_name_scope: bool = True) -> Any:
        """Reduce the original gradient, with the scale that its wire came back with."""
        op = hvd.Average if action == _DENSE_AVERAGE else hvd.Sum
        dense = tf.cast(gradient, _DENSE_DTYPES[self._dtype])
        total = hvd.allreduce(dense, op=op, name=name, process_set=self._ranks, ignore_name_scope=ignore_name_scope)
        if action == _DENSE_OTHER:
            total *= tf.cast(factor, total.dtype)
        return tf.cast(total, self._dtype)


def _action_of(outcome: Outcome) -> int:
    if outcome.decoded is not None:
        return _DECODED
    return {"sum": _DENSE_SUM, "average": _DENSE_AVERAGE, "other": _DENSE_OTHER}[outcome.header.scale]


def _name_of_reduction(wire: Any) -> tuple[str, bool]:
    """What a reduced wire is called in a graph, and whether Horovod leaves out the scopes around that.

    Reductions have names that are equal on all ranks and differ from each other, either within their scopes or without them.
    """
    name = f"{wire.op.name.rsplit('/', 1)[-1]}.{wire.value_index}"
    return name, "ignore_name_scope" in wire.op.node_def.attr and bool(wire.op.get_attr("ignore_name_scope"))


def _is_in_a_group() -> bool:
    """Is a tensor being compressed that Horovod reduces together with others? All of them must then have one type."""
    frame = sys._getframe(1).f_back
    for _ in range(_FRAMES_TO_LOOK_AT):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == hvd.__name__:
            name = frame.f_code.co_name.removeprefix("tf__")  # so AutoGraph calls what it converted
            if name in ("allreduce", "grouped_allreduce"):
                return name == "grouped_allreduce"
        frame = frame.f_back
    return False


def _call(function: Callable[..., Any], inputs: list[Any], outputs: list[Any]) -> Any:
    """Call Python from a graph, once per step.

    A stateful call would be put in order with all other stateful calls, so that tensors were reduced one after the other.
    A stateless one may run at any time, but might be folded into a constant; an input that is no constant prevents that.
    """
    never_constant = tf.raw_ops.RandomUniform(shape=[0], dtype=tf.float32, seed=1, seed2=1)

    def without_guard(*arguments: Any) -> Any:
        return function(*arguments[:-1])

    return tf.numpy_function(without_guard, [*inputs, never_constant], outputs, stateful=False)
