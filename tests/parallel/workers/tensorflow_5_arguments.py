"""Arguments that can't be meant as they are given, and the errors that say so."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import case
from misuse import (
    DIFFERENT_SIZES,
    check_different_sizes,
    check_wrong_options,
    check_wrong_values_of_compression,
    expect,
    sparse,
)

from hvd_lhc.tensorflow import LHC, Compression

NUMEL = 20_000


@case(2)
def wrong_options() -> None:
    """Options by position, unknown ones and wrong types raise ConfigError with what to write."""
    check_wrong_options(LHC)


@case(2)
def wrong_compressors_by_hand() -> None:
    """A class instead of an instance, or all of Compression, raises ConfigError out of hvd.allreduce."""
    check_wrong_values_of_compression(LHC, Compression, lambda what: hvd.allreduce(tf.ones(NUMEL), compression=what))


@case(2)
def wrong_compressors_of_a_tape() -> None:
    """The same out of a DistributedGradientTape, eagerly and in a tf.function."""

    def take_gradient(what: Any) -> Any:
        variable = tf.Variable(tf.ones(NUMEL))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 2)
        return hvd.DistributedGradientTape(tape, compression=what).gradient(loss, [variable])

    check_wrong_values_of_compression(LHC, Compression, take_gradient)

    def in_a_function(what: Any) -> Any:
        @tf.function
        def reduce(tensor: Any) -> Any:
            return hvd.allreduce(tensor, compression=what, name="wrong_compressor")

        return reduce(tf.ones(NUMEL))

    check_wrong_values_of_compression(LHC, Compression, in_a_function)


@case(2)
def arrays_of_others() -> None:
    """A NumPy array or a list is answered by how to make a tensor of it, whatever its size; the next tensor is reduced."""
    calls: list[Callable[[Any], Any]] = [
        LHC().compress,
        Compression.lhc.compress,
        lambda array: hvd.allreduce(array, compression=Compression.lhc),
    ]
    for array in (np.ones(NUMEL, np.float32), np.ones(3, np.float32), [1.0, 2.0]):
        for call in calls[: 2 if isinstance(array, list) else 3]:  # Horovod itself takes no list
            expect(lambda call=call, array=array: call(array), "tf.Tensor", type(array).__name__, "tf.convert_to_tensor")
    total = hvd.allreduce(tf.ones(NUMEL), compression=Compression.lhc, op=hvd.Sum)
    assert np.array_equal(total.numpy(), np.full(NUMEL, hvd.size(), np.float32))


@case(2)
def different_shapes() -> None:
    """Ranks with tensors of different sizes, by hand, in functions and in tapes: an error that names shapes on every rank."""

    def by_hand(lhc: Any, tensor: Any, name: str | None) -> Any:
        wire, context = lhc.compress(tensor)
        return lhc.decompress(hvd.allreduce(wire, name=name, op=hvd.Sum), context)

    def by_argument(lhc: Any, tensor: Any, name: str | None) -> Any:
        return hvd.allreduce(tensor, name=name, compression=lhc)

    def of_a_tape(lhc: Any, tensor: Any, name: str | None) -> Any:
        del name
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(tensor * tensor)
        return hvd.DistributedGradientTape(tape, compression=lhc).gradient(loss, [tensor])

    def in_a_function(call: Callable[..., Any], lhc: Any, name: str | None) -> Callable[..., Any]:
        @tf.function
        def inner(tensor: Any) -> Any:
            return call(lhc, tensor, name)

        @tf.function
        def outer(tensor: Any) -> Any:  # as in Keras; the name of a reduction has those of both functions in it
            return inner(tensor)

        return outer

    names = itertools.count()
    for call in (by_hand, by_argument, of_a_tape):
        for graph in (False, True):
            for *sizes, before in DIFFERENT_SIZES:
                lhc, name = LHC(), None if call is by_argument and graph else f"different.shapes.{next(names)}"
                reduce = in_a_function(call, lhc, name) if graph else functools.partial(call, lhc, name=name)
                for _ in range(before):
                    reduce(tf.constant(sparse(50_000)))
                mine = sizes[hvd.rank()]
                check_different_sizes(hvd.rank(), mine, lambda array, reduce=reduce: reduce(tf.constant(array)))
