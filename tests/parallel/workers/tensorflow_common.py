"""What the TensorFlow cases share: starting, meeting, reducing with and without compression, eagerly and in a graph."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from exact import Array, assert_same_bits, draw_gradients, exact_sum

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
    factor = Fraction(1, ranks.size()) if op == hvd.Average else Fraction(1)
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
        if ranks.size() == 2 and dtype != "bfloat16" or happened[-1] != "sketch" and dtype == "float32":
            assert_same_bits(result, plain(tensor, name, op=op, process_set=ranks), f"{what}, against plain Horovod")
        if ranks.size() > 2 and happened[-1] == "sketch" or dtype == "bfloat16":
            exact = exact_sum(gradients, factor, dtype).reshape(result.shape).astype(result.dtype)
            assert_same_bits(result, exact, f"{what}, against the exact sum")
    return happened


def count(lhc: LHC) -> dict[str, int]:
    """How many tensors went which way so far; retries by reason."""
    statistics = lhc.statistics
    kinds = {"sketch": statistics.sketches, "probe": statistics.probes, "dense": statistics.dense}
    assert sum(statistics.refusals.values()) == statistics.retries
    return {**kinds, **statistics.refusals}


def difference(before: dict[str, int], after: dict[str, int]) -> str:
    """What happened to the one tensor between two counts: ``sketch``, ``probe``, ``dense`` or the reason of a retry."""
    new = [kind for kind in after if after[kind] != before.get(kind, 0)]
    assert len(new) == 1 and after[new[0]] == before.get(new[0], 0) + 1, f"from {before} to {after}"
    return new[0]


def integer_steps(key: object, numel: int, counts: list[int | list[int]], support: str = "random") -> list[list[Array]]:
    """Gradients of integers for every step: a number of nonzeros for all ranks, or one for each."""
    steps = []
    for number, nonzeros in enumerate(counts):
        each = nonzeros if isinstance(nonzeros, list) else [nonzeros] * hvd.size()
        drawn = {n: draw_gradients((key, number), numel, n, hvd.size(), support) for n in set(each)}
        steps.append([drawn[n][rank] for rank, n in enumerate(each)])
    return steps


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
