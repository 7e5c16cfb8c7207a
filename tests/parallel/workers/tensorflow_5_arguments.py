"""Arguments that can't be meant as they are given, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from harness import case
from misuse import check_wrong_options, check_wrong_values_of_compression, expect

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
