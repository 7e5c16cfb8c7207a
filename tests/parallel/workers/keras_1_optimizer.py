"""``model.fit`` of tf_keras with ``hvd.DistributedOptimizer(compression=Compression.lhc)``."""

from __future__ import annotations

import hashlib
import os
import tempfile
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import tensorflow as tf
import tf_keras
from harness import case
from keras_common import PAIR, ROW, ROWS, batches, build_model, check_fit, fit, initial_weights
from steps import count
from tensorflow_common import raised, same_everywhere

from hvd_lhc import UnsupportedError
from hvd_lhc.tensorflow import LHC, Compression
from hvd_lhc.tensorflow.keras import callbacks


def sgd() -> Any:
    """SGD with momentum, which also moves rows that have no gradient in a step."""
    return tf_keras.optimizers.SGD(0.1, momentum=0.9)


def adam() -> Any:
    """Adam, which makes the smallest elements count as much as the largest."""
    return tf_keras.optimizers.Adam(0.01)


def assert_sketched(happened: dict[str, int], steps: int) -> None:
    """The table was sketched in all steps but the first and at most one more; nothing else was touched."""
    refused = sum(number for kind, number in happened.items() if kind not in ("sketch", "probe", "dense"))
    assert happened["probe"] == 1 and happened["dense"] == 0 and refused <= 1, happened
    assert happened["sketch"] + refused == steps - 1, happened


@case(2, 3, 4)
def fit_with_the_shared_compressor() -> None:
    """Compression.lhc: the weights of plain Horovod at two ranks, the same on all ranks at three."""
    assert tf.keras.__name__.startswith("tf_keras") or "tf_keras" in tf.keras.optimizers.SGD.__module__
    assert_sketched(check_fit("shared", sgd, Compression.lhc), steps=20)


@case(2)
def fit_with_adam() -> None:
    """Adam ends in the same weights too."""
    assert_sketched(check_fit("adam", adam, LHC()), steps=20)


@case(2)
def fit_with_a_legacy_optimizer() -> None:
    """So does an optimizer of tf_keras.optimizers.legacy."""
    assert_sketched(check_fit("legacy", lambda: tf_keras.optimizers.legacy.Adam(0.01), LHC(), steps=8), steps=8)


@case(2)
def fit_eagerly() -> None:
    """run_eagerly=True."""
    assert_sketched(check_fit("eager", sgd, LHC(), steps=8, compile_options={"run_eagerly": True}), steps=8)


@case(2, 3, 4)
def several_steps_per_execution() -> None:
    """steps_per_execution=4: the steps of a loop within one graph."""
    assert_sketched(check_fit("four steps", sgd, LHC(), steps=16, compile_options={"steps_per_execution": 4}), steps=16)


@case(2)
def several_backward_passes() -> None:
    """backward_passes_per_step=2: gradients are summed on each rank, then reduced once."""
    for compile_options in ({}, {"run_eagerly": True}):
        happened = check_fit(
            "two passes", sgd, LHC(), steps=16, compile_options=compile_options, backward_passes_per_step=2
        )
        assert happened["sketch"] >= 6 and happened["probe"] == 1, happened


@case(2)
def options_of_the_optimizer() -> None:
    """Sum, a predivide factor and groups: the weights of plain Horovod."""
    for options in ({"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 1}):
        happened = check_fit(f"{options}", sgd, LHC(), steps=8, **options)
        assert happened["sketch"] >= 6, f"{options}: {happened}"


@case(2)
def sparse_gradients() -> None:
    """Without sparse_as_dense the table's gradient stays IndexedSlices, which Horovod gathers: nothing is compressed."""
    happened = check_fit("gathered", sgd, LHC(), steps=4, sparse_as_dense=False)
    assert happened == {"sketch": 0, "probe": 0, "dense": 0}, happened


@case(3)
def process_set_of_an_optimizer() -> None:
    """Two of three ranks fit together with the weights of plain Horovod; the third fits alone."""
    lhc = LHC(process_set=PAIR)
    weights = fit(sgd(), lhc, 6, {}, process_set=PAIR)
    assert weights == fit(sgd(), hvd.Compression.none, 6, {}, process_set=PAIR) and weights != initial_weights()
    happened = count(lhc)
    if PAIR.included():
        assert_sketched(happened, steps=6)
    else:
        assert happened == {"sketch": 0, "probe": 0, "dense": 0}, happened


@case(2)
def saved_and_loaded() -> None:
    """horovod.tensorflow.keras.load_model with the compressor: training goes on with the weights of plain Horovod's.

    It takes no sparse_as_dense, so that gradients of tables are gathered; and it can't load what is saved as .keras.
    """
    model = build_model()
    model.compile(hvd.DistributedOptimizer(adam(), compression=LHC(), sparse_as_dense=True), "mse")
    model.fit(batches(4), verbose=0)
    weights = []
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.h5")
        model.save(path)
        for compression in (LHC(), hvd.Compression.none):
            loaded = hvd.load_model(path, compression=compression)
            loaded.fit(batches(8).skip(4), verbose=0)
            weights.append([array.tobytes() for array in loaded.get_weights()])
    assert weights[0] == weights[1] and weights[0][0] != model.get_weights()[0].tobytes()


@case(2, 3, 4)
def callbacks_for_both_versions() -> None:
    """hvd_lhc's callbacks work with Keras 2 as well: initial weights of rank 0, averaged metrics.

    Horovod's own ones take Keras 3 for their backend where it is installed, and fail.
    """
    tf_keras.utils.set_random_seed(hvd.rank())
    layers = tf_keras.layers
    model = tf_keras.Sequential([layers.Embedding(ROWS, ROW), layers.GlobalAveragePooling1D(), layers.Dense(1)])
    lhc = LHC()
    model.compile(hvd.DistributedOptimizer(sgd(), compression=lhc, sparse_as_dense=True), "mse")
    both = [callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()]
    history = model.fit(batches(4), epochs=3, verbose=0, callbacks=both).history
    same_everywhere([hashlib.sha256(array.tobytes()).hexdigest() for array in model.get_weights()], "broadcast weights")
    same_everywhere(history["loss"], "averaged loss")
    assert count(lhc)["sketch"] >= 8, count(lhc)


@case(2)
def keras_3_optimizer_is_refused() -> None:
    """An optimizer of Keras 3 is refused although TensorFlow itself uses Keras 2."""
    assert keras.__version__.startswith("3.")
    error = raised(UnsupportedError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=LHC()))
    assert "DistributedGradientTape" in str(error) and "tf_keras" in str(error), error


@case(2)
def jit_compile_is_refused() -> None:
    """model.compile(jit_compile=True) can't hold a compressor: an error says so, and names the way out."""
    error = raised(UnsupportedError, lambda: fit(sgd(), LHC(), 2, {"jit_compile": True}))
    assert "jit_compile=False" in str(error), error
