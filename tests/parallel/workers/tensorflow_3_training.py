"""Training through ``hvd.DistributedGradientTape`` and ``hvd.DistributedOptimizer``: what compression must not change.

The model sums rows of a table and puts a linear layer on top. A batch touches few rows, so that the table's gradient,
made dense by ``sparse_as_dense=True``, is sketched, and those of the layer pass through.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import tensorflow as tf
from exact import assert_same_bits, exact_sum, generator
from harness import case
from steps import count
from tensorflow_common import MODES, PAIR, as_array, bits_of, raised, same_everywhere

from hvd_lhc import UnsupportedError
from hvd_lhc.tensorflow import LHC

ROWS, ROW = 4000, 16
SAMPLES, WORDS = 8, 3
STEPS = 20


class Model(tf.Module):
    """A table of words, and a linear layer on the mean of the rows of a sample's words."""

    def __init__(self) -> None:
        super().__init__()
        random = generator("weights")
        self.table = tf.Variable(random.normal(size=(ROWS, ROW)).astype(np.float32), name="the_table")
        self.head = tf.Variable(random.normal(size=(ROW, 1)).astype(np.float32), name="the_head")
        self.bias = tf.Variable(np.zeros(1, np.float32), name="the_bias")
        self.velocities = [tf.Variable(tf.zeros_like(w), trainable=False) for w in self.weights]

    @property
    def weights(self) -> list[Any]:
        """What is trained."""
        return [self.table, self.head, self.bias]

    def loss(self, words: Any, targets: Any) -> Any:
        """The squared error."""
        means = tf.reduce_mean(tf.gather(self.table, words), axis=1)
        return tf.reduce_mean((means @ self.head + self.bias - targets) ** 2)

    def update(self, gradients: list[Any]) -> None:
        """SGD with momentum, which also moves rows that have no gradient in a step."""
        for weight, velocity, gradient in zip(self.weights, self.velocities, gradients, strict=True):
            velocity.assign(0.9 * velocity + tf.convert_to_tensor(gradient))
            weight.assign_sub(0.1 * velocity)


def batch(step: int, rank: int) -> tuple[Any, Any]:
    """What a rank trains on in a step."""
    random = generator("batch", step, rank)
    words = tf.constant(random.integers(0, ROWS, (SAMPLES, WORDS)))
    return words, tf.constant(random.normal(size=(SAMPLES, 1)).astype(np.float32))


def train(
    compression: Any, mode: str, groups: Callable[[Model], Any] = lambda model: None, steps: int = STEPS, **options: Any
) -> Model:
    """Train a model with a DistributedGradientTape.

    Args:
        compression: as for Horovod.
        mode: one of ``MODES``, for the training step.
        groups: the groups for Horovod, from the model.
        steps: how many.
        options: further options of the tape.
    """
    model = Model()
    options = {"sparse_as_dense": True, **options}

    def step(words: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(words, targets)
        tape = hvd.DistributedGradientTape(tape, compression=compression, groups=groups(model), **options)
        model.update(tape.gradient(loss, model.weights))

    run = tf.function(step) if mode == "graph" else step
    for number in range(steps):
        run(*batch(number, hvd.rank()))
    return model


def check_training(name: str, lhc: LHC, mode: str, **options: Any) -> dict[str, int]:
    """Train with compression; returns how many tensors went which way.

    Weights and counts are the same on all ranks; with two ranks, weights have the bits of training without compression.
    """
    model = train(lhc, mode, **options)
    happened = count(lhc)
    for start, end in zip(bits_of(Model().weights), bits_of(model.weights), strict=True):
        assert start != end, f"{name}: training left a weight as it was"
    same_everywhere([hashlib.sha256(bits).hexdigest() for bits in bits_of(model.weights)], f"{name} weights")
    same_everywhere(happened, f"{name} statistics")
    if hvd.size() == 2:
        expected = train(hvd.Compression.none, mode, **options)
        for weight, other in zip(model.weights, expected.weights, strict=True):
            assert_same_bits(as_array(weight), as_array(other), f"{name}, {mode}, {weight.name}, with and without compression")
    return happened


def assert_sketched(happened: dict[str, int], steps: int = STEPS) -> None:
    """The table was sketched in all steps but the first and at most one more; nothing else was touched."""
    refused = sum(number for kind, number in happened.items() if kind not in ("sketch", "probe", "dense"))
    assert happened["probe"] == 1 and happened["dense"] == 0 and refused <= 1, happened
    assert happened["sketch"] + refused == steps - 1, happened


@case(2, 3, 4)
def training_in_a_function() -> None:
    """A training step in a tf.function: the weights of plain Horovod at two ranks, and the same on all ranks at three."""
    assert_sketched(check_training("traced", LHC(), "graph"))


@case(2, 3, 4)
def training_eagerly() -> None:
    """The same in an eager loop."""
    assert_sketched(check_training("eager", LHC(), "eager"))


@case(3)
def gradients_of_every_step() -> None:
    """What the tape returns for the table is the exact average of the ranks' gradients, rounded once."""
    model, lhc = Model(), LHC()

    def gradient_of(words: Any, targets: Any, distributed: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(words, targets)
        if distributed:
            tape = hvd.DistributedGradientTape(tape, compression=lhc, sparse_as_dense=True)
        return tape.gradient(loss, model.weights)[0]

    for step in range(4):
        locals_ = [as_array(tf.convert_to_tensor(gradient_of(*batch(step, rank), False))) for rank in range(hvd.size())]
        before = lhc.statistics.sketches
        result = as_array(gradient_of(*batch(step, hvd.rank()), True))
        if step:
            assert lhc.statistics.sketches == before + 1, lhc.statistics
            assert_same_bits(result, exact_sum(locals_, Fraction(1, hvd.size())), f"step {step}")


@case(2)
def sparse_gradients() -> None:
    """Without sparse_as_dense the table's gradient stays IndexedSlices, which Horovod gathers: nothing is compressed."""
    for mode in MODES:
        happened = check_training("gathered", LHC(), mode, sparse_as_dense=False, steps=5)
        assert happened == {"sketch": 0, "probe": 0, "dense": 0}, happened


@case(2, 3, 4)
def groups_of_gradients() -> None:
    """Gradients that are reduced in groups: a number of groups, and a list of lists of variables."""
    for groups in (lambda model: 2, lambda model: [[model.table, model.bias]]):
        for mode in MODES:
            happened = check_training("groups", LHC(), mode, groups=groups, steps=8)
            assert happened["sketch"] >= 6 and happened["probe"] >= 1, f"{mode}: {happened}"


@case(2)
def predivide_factor_and_sum() -> None:
    """gradient_predivide_factor and op=Sum: the weights of plain Horovod."""
    for options in ({"gradient_predivide_factor": 2.0}, {"op": hvd.Sum}):
        assert_sketched(check_training(f"{options}", LHC(), "graph", steps=8, **options), steps=8)


@case(3)
def process_set_of_a_tape() -> None:
    """Two of three ranks train together with the weights of plain Horovod; the third trains alone."""
    for mode in MODES:
        lhc = LHC(process_set=PAIR)
        model = train(lhc, mode, process_set=PAIR, steps=6)
        expected = train(hvd.Compression.none, mode, process_set=PAIR, steps=6)
        for weight, other in zip(model.weights, expected.weights, strict=True):
            assert_same_bits(as_array(weight), as_array(other), f"{mode}, {weight.name}")
        happened = count(lhc)
        if PAIR.included():
            assert_sketched(happened, steps=6)
        else:
            assert happened == {"sketch": 0, "probe": 0, "dense": 0}, happened


@case(2, 3, 4)
def distributed_optimizer() -> None:
    """hvd.DistributedOptimizer around an optimizer of TensorFlow 1, Adam: as with the tape."""

    def train_with(compression: Any) -> Model:
        model = Model()
        adam = tf.compat.v1.train.AdamOptimizer(0.01)
        optimizer = hvd.DistributedOptimizer(adam, compression=compression, sparse_as_dense=True)
        for step in range(8):
            words, targets = batch(step, hvd.rank())
            optimizer.minimize(lambda words=words, targets=targets: model.loss(words, targets), var_list=model.weights)
        return model

    lhc = LHC()
    model = train_with(lhc)
    assert_sketched(count(lhc), steps=8)
    same_everywhere([hashlib.sha256(bits).hexdigest() for bits in bits_of(model.weights)], "optimizer weights")
    if hvd.size() == 2:
        assert bits_of(model.weights) == bits_of(train_with(hvd.Compression.none).weights)


def keras_model() -> Any:
    """A model of Keras 3 with a table and a linear layer."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(ROWS, ROW), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.build((None, WORDS))
    return model


@case(2)
def keras_3_optimizer_is_refused() -> None:
    """Horovod's DistributedOptimizer reduces nothing under Keras 3: an error says so, and names the ways out."""
    assert keras.__version__.startswith("3.")
    for wrap in (hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer):
        for optimizer in (keras.optimizers.SGD(0.1), keras.optimizers.Adam()):
            error = raised(UnsupportedError, lambda wrap=wrap, optimizer=optimizer: wrap(optimizer, compression=LHC()))
            assert "DistributedGradientTape" in str(error) and "tf_keras" in str(error), error


@case(2)
def keras_3_with_a_tape() -> None:
    """The way out of that error: a model and an optimizer of Keras 3 in a custom loop, with a DistributedGradientTape."""

    def train_with(compression: Any) -> list[bytes]:
        model, optimizer = keras_model(), keras.optimizers.Adam(0.01)

        @tf.function
        def run(words: Any, targets: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(words, training=True) - targets) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=True)
            gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))

        for step in range(8):
            run(*batch(step, hvd.rank()))
        return bits_of(model.get_weights())

    lhc = LHC()
    weights = train_with(lhc)
    assert_sketched(count(lhc), steps=8)
    assert weights == train_with(hvd.Compression.none)
    same_everywhere([hashlib.sha256(bits).hexdigest() for bits in weights], "keras 3 weights")
