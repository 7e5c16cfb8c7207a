"""What the TensorFlow cases share: starting, meeting, reducing with and without compression, eagerly and in a graph."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from exact import Array, assert_same_bits
from steps import check_result, count, difference

from hvd_lhc.tensorflow import LHC

#: Ranks 0 and 2, known to Horovod where there are three ranks.
PAIR = hvd.ProcessSet([0, 2])
#: What most cases are run in: eagerly, and in a ``tf.function``.
MODES = ("eager", "graph")


def start() -> int:
    """Initialize Horovod; returns the rank."""
    three = os.environ.get("HOROVOD_SIZE") == "3"
    hvd.init(process_sets=[PAIR] if three else None)
    return int(hvd.rank())


def meet(name: str) -> None:
    """Wait for all ranks."""
    hvd.allreduce(tf.zeros(1), name=node_name(f"meet {name}"), op=hvd.Sum)


def node_name(name: str) -> str:
    """The name as TensorFlow allows it."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)


def reducer(compression: Any, name: str, mode: str = "eager", **options: Any) -> Callable[[Any], Any]:
    """What reduces a tensor in a mode; in a graph, use one for all steps, since each is a trace of its own."""

    def call(tensor: Any) -> Any:
        return hvd.allreduce(tensor, compression=compression, name=node_name(name), **options)

    return tf.function(call) if mode == "graph" else call


def as_array(tensor: Any) -> Array:
    """The tensor in NumPy: of its own type, but bfloat16 as float32."""
    array: Array = (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy()
    return array


def plain(tensor: Any, name: str, **options: Any) -> Array:
    """The tensor reduced without compression."""
    return as_array(hvd.allreduce(tensor, compression=hvd.Compression.none, name=node_name(f"{name} plain"), **options))


def check_steps(
    name: str,
    steps: list[list[Array]],
    lhc: LHC,
    op: Any,
    mode: str = "eager",
    ranks: Any = None,
    dtype: str = "float32",
) -> list[str]:
    """Reduce one gradient per step and check every result; returns what happened in each step.

    With two ranks a result must have the bits of plain Horovod's; with more, those of the exact sum (or average) rounded
    once. Steps that were reduced dense are compared with plain Horovod always.

    Args:
        name: of the tensor.
        steps: for every step the gradients of all ranks.
        lhc: the compressor.
        op: ``hvd.Sum`` or ``hvd.Average``.
        mode: one of ``MODES``.
        ranks: a process set, of which this rank is one.
        dtype: the format that the tensor has.
    """
    ranks = hvd.global_process_set if ranks is None else ranks
    reduce = reducer(lhc, name, mode, op=op, process_set=ranks)
    happened = []
    for number, gradients in enumerate(steps):
        what = f"{name}, {mode}, step {number}"
        tensor = tf.cast(tf.constant(gradients[ranks.rank()]), dtype)
        before, unchanged = count(lhc), as_array(tensor).copy()
        reduced = reduce(tensor)
        happened.append(difference(before, count(lhc)))
        assert reduced.dtype == tensor.dtype and reduced.shape == tensor.shape, f"{what}: {reduced.dtype} {reduced.shape}"
        assert_same_bits(as_array(tensor), unchanged, f"{what}, the input")
        result = as_array(reduced)
        uncompressed = plain(tensor, name, op=op, process_set=ranks) if dtype != "bfloat16" else None
        check_result(result, gradients, uncompressed, happened[-1], op == hvd.Average, dtype, what)
    return happened


def same_everywhere(value: Any, name: str) -> None:
    """All ranks hold the same value."""
    values = hvd.allgather_object(value, name=node_name(name))
    assert all(other == values[0] for other in values), f"{name} differs between ranks: {values}"


def raised(kind: type[Exception], call: Callable[..., Any], *arguments: Any) -> Exception:
    """The exception that a call must raise."""
    try:
        call(*arguments)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def error_in(mode: str, kind: type[Exception]) -> type[Exception]:
    """As what a user meets an exception of ours: TensorFlow wraps those that are raised while a graph runs."""
    wrapped: type[Exception] = tf.errors.OpError
    return wrapped if mode == "graph" else kind


def bits_of(variables: list[Any]) -> list[bytes]:
    """The bits of variables."""
    return [np.asarray(variable).tobytes() for variable in variables]
