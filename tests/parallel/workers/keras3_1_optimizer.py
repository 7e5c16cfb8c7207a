"""``hvd_lhc.tensorflow.keras.DistributedOptimizer``: Keras 3 in ``model.fit`` and in loops of one's own."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from exact import generator
from harness import case
from keras_common import PAIR, ROW, ROWS, batches, build_model, check_fit, fit, initial_weights
from steps import count
from tensorflow_common import raised, same_everywhere

from hvd_lhc import ConfigError, UnsupportedError
from hvd_lhc.tensorflow.keras import LHC, Compression, DistributedOptimizer, callbacks, load_model


def sgd() -> Any:
    """SGD with momentum, which also moves rows that have no gradient in a step."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def assert_sketched(happened: dict[str, int], steps: int) -> None:
    """The table was sketched in all steps but the first and at most one more; nothing else was touched."""
    refused = sum(number for kind, number in happened.items() if kind not in ("sketch", "probe", "dense"))
    assert happened["probe"] == 1 and happened["dense"] == 0 and refused <= 1, happened
    assert happened["sketch"] + refused == steps - 1, happened


def gradients(step: int, rank: int) -> list[Any]:
    """Gradients of a table, which has two nonzero rows, and of a vector: integers."""
    random = generator("gradients", step, rank)
    table = np.zeros((ROWS, ROW), np.float32)
    table[random.integers(0, ROWS, 2)] = random.integers(1, 9, (2, ROW))
    return [tf.constant(table), tf.constant(random.integers(1, 9, ROW), tf.float32)]


def sums(steps: range) -> list[Any]:
    """Over all ranks and some steps."""
    everything = [gradients(step, rank) for step in steps for rank in range(hvd.size())]
    return [np.sum([np.asarray(one[index]) for one in everything], axis=0) for index in range(2)]


def new_variables() -> list[Any]:
    """A table and a vector of zeros."""
    return [keras.Variable(np.zeros((ROWS, ROW), np.float32)), keras.Variable(np.zeros(ROW, np.float32))]


def applier(optimizer: Any, variables: list[Any], graph: bool) -> Any:
    """What applies gradients to variables, eagerly or in a graph."""

    def apply(grads: list[Any]) -> None:
        optimizer.apply(grads, variables)

    return tf.function(apply) if graph else apply


@case(2, 3, 4)
def fit_with_the_shared_compressor() -> None:
    """model.fit reduces: the weights of no compression at two ranks, the same weights on all ranks with more."""
    assert keras.__version__.startswith("3.")
    assert_sketched(check_fit("shared", sgd, Compression.lhc), steps=20)


@case(2, 3, 4)
def gradients_are_summed() -> None:
    """A step of SGD subtracts the exact sum of all ranks' gradients: with and without compression, eagerly and in a graph."""
    for compression in (Compression.none, Compression.fp16, LHC()):
        for graph in (False, True):
            optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, op=hvd.Sum)
            variables = new_variables()
            optimizer.build(variables)
            apply = applier(optimizer, variables, graph)
            for step in range(3):
                apply(gradients(step, hvd.rank()))
            for variable, total in zip(variables, sums(range(3)), strict=True):
                assert np.array_equal(variable.numpy(), -total), f"{compression}, graph {graph}"
            assert int(optimizer.iterations) == 3


@case(2)
def every_way_to_apply() -> None:
    """With variables, on a built optimizer and by apply_gradients, gradients are reduced once."""
    for way in range(3):
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=LHC(), op=hvd.Sum)
        variables = new_variables()
        mine = gradients(0, hvd.rank())
        if way == 0:
            optimizer.apply(mine, variables)
        elif way == 1:
            optimizer.build(variables)
            optimizer.apply(mine)
        else:
            optimizer.apply_gradients(zip(mine, variables, strict=True))
        for variable, total in zip(variables, sums(range(1)), strict=True):
            assert np.array_equal(variable.numpy(), -total), way


@case(2)
def optimizers_of_keras() -> None:
    """Adam, AdamW with a schedule and clipping, Lamb: the weights of no compression."""
    makers = {
        "adam": lambda: keras.optimizers.Adam(0.01),
        "adamw": lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.5), weight_decay=0.01, global_clipnorm=0.5
        ),
        "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    }
    for name, make in makers.items():
        assert_sketched(check_fit(name, make, LHC(), steps=8), steps=8)


@case(2, 3, 4)
def several_steps_per_execution() -> None:
    """steps_per_execution=4, and run_eagerly."""
    options = {"steps_per_execution": 4}
    assert_sketched(check_fit("four steps", sgd, LHC(), steps=16, compile_options=options), steps=16)
    assert_sketched(check_fit("eager", sgd, LHC(), steps=8, compile_options={"run_eagerly": True}), steps=8)


@case(2)
def options_of_the_optimizer() -> None:
    """Sum, a predivide factor, groups and groups by variable: the weights of no compression."""
    for options in ({"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 1}):
        happened = check_fit(f"{options}", sgd, LHC(), steps=8, **options)
        assert happened["sketch"] >= 6, f"{options}: {happened}"


@case(2, 3, 4)
def groups_of_variables() -> None:
    """groups= takes variables of Keras."""
    variables = new_variables()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=LHC(), op=hvd.Sum, groups=[variables])
    optimizer.build(variables)
    for step in range(3):
        optimizer.apply(gradients(step, hvd.rank()), variables)
    for variable, total in zip(variables, sums(range(3)), strict=True):
        assert np.array_equal(variable.numpy(), -total)


@case(2, 3, 4)
def several_backward_passes() -> None:
    """backward_passes_per_step=2: two gradients are added up on each rank, then reduced once."""
    for graph in (False, True):
        for average in (False, True):
            lhc = LHC()
            optimizer = DistributedOptimizer(
                keras.optimizers.SGD(1.0),
                compression=lhc,
                op=hvd.Sum,
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )
            variables = new_variables()
            optimizer.build(variables)
            apply = applier(optimizer, variables, graph)
            for step in range(6):
                apply(gradients(step, hvd.rank()))
                expected = sums(range(step + 1 - (step + 1) % 2)) if step else [0.0, 0.0]
                for variable, total in zip(variables, expected, strict=True):
                    assert (variable.numpy() == -total / (2 if average else 1)).all(), f"{graph} {step}"
            assert int(optimizer.iterations) == 3 and lhc.statistics.sketches == 2, lhc.statistics
    happened = check_fit("two passes", sgd, LHC(), steps=16, backward_passes_per_step=2)
    assert happened["sketch"] >= 6, happened


@case(2)
def sparse_gradients() -> None:
    """Without sparse_as_dense the table's gradient stays IndexedSlices, which Horovod gathers: nothing is compressed."""
    happened = check_fit("gathered", sgd, LHC(), steps=4, sparse_as_dense=False)
    assert happened == {"sketch": 0, "probe": 0, "dense": 0}, happened
    options = {"sparse_as_dense": False, "backward_passes_per_step": 2}
    error = raised(UnsupportedError, lambda: fit(sgd(), LHC(), 2, {}, **options))
    assert "sparse_as_dense=True" in str(error), error


@case(2)
def jit_compile_is_refused() -> None:
    """XLA can't hold Horovod's operations: an error says what to write, also without a compressor."""
    for compression in (LHC(), Compression.none):
        error = raised(UnsupportedError, lambda c=compression: fit(sgd(), c, 2, {"jit_compile": True}))
        assert "jit_compile=False" in str(error), error


@case(2, 3, 4)
def loss_scale_optimizer() -> None:
    """Infinity on one rank leaves a step out on all ranks and lowers the scale; training goes on with the same weights."""
    for graph in (False, True):
        lhc = LHC()
        inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
        optimizer = DistributedOptimizer(inner, compression=lhc, op=hvd.Sum)
        variables = new_variables()
        optimizer.build(variables)
        apply = applier(optimizer, variables, graph)
        for step in range(5):
            scale = float(optimizer.dynamic_scale.numpy())
            assert scale == (8.0 if step <= 2 else 4.0), scale
            mine = [scale * gradient for gradient in gradients(step, hvd.rank())]
            if step == 2 and hvd.rank() == 1:
                mine[0] = mine[0] + tf.one_hot(7, ROWS)[:, None] * np.inf
                mine[0] = tf.where(tf.math.is_nan(mine[0]), 0.0, mine[0])
            apply(mine)
        totals = [a + b for a, b in zip(sums(range(2)), sums(range(3, 5)), strict=True)]
        for variable, total in zip(variables, totals, strict=True):
            assert np.array_equal(variable.numpy(), -total), f"graph {graph}"
        assert lhc.statistics.retries == 1, lhc.statistics


@case(2)
def mixed_precision() -> None:
    """With mixed_float16, model.compile puts a LossScaleOptimizer around what it is given: refused, and the way out works."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        error = raised(UnsupportedError, lambda: fit(sgd(), LHC(), 2, {}))
        assert "LossScaleOptimizer(optimizer)" in str(error), error
        happened = check_fit("mixed", lambda: keras.optimizers.LossScaleOptimizer(sgd()), LHC(), steps=8)
    finally:
        keras.config.set_dtype_policy("float32")
    assert happened["sketch"] + happened["probe"] >= 2, happened


@case(3)
def process_set_of_an_optimizer() -> None:
    """Two of three ranks fit together with the weights of no compression; the third fits alone."""
    lhc = LHC(process_set=PAIR)
    weights = fit(sgd(), lhc, 6, {}, process_set=PAIR)
    assert weights == fit(sgd(), Compression.none, 6, {}, process_set=PAIR) and weights != initial_weights()
    if PAIR.included():
        assert_sketched(count(lhc), steps=6)
    else:
        assert count(lhc) == {"sketch": 0, "probe": 0, "dense": 0}


@case(2)
def other_arguments_are_refused() -> None:
    """Min, no passes, an optimizer that is distributed already, and wrong numbers of gradients."""
    raised(UnsupportedError, lambda: DistributedOptimizer(sgd(), op=hvd.Min))
    raised(UnsupportedError, lambda: DistributedOptimizer(sgd(), op=hvd.Adasum))
    raised(ConfigError, lambda: DistributedOptimizer(sgd(), backward_passes_per_step=0))
    raised(ConfigError, lambda: DistributedOptimizer(DistributedOptimizer(sgd())))
    raised(ConfigError, lambda: DistributedOptimizer(sgd()).apply([tf.zeros(3)], new_variables()))


@case(2, 3, 4)
def saved_and_loaded() -> None:
    """A model saved in the middle loads without Horovod, and with load_model it goes on as if it hadn't been interrupted."""
    straight, interrupted = build_model(), build_model()
    first, second = batches(4), batches(8).skip(4)
    for model in (straight, interrupted):
        optimizer = DistributedOptimizer(keras.optimizers.Adam(0.01), compression=LHC(), sparse_as_dense=True)
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(first, verbose=0)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.keras")
        interrupted.save(path)
        alone = keras.models.load_model(path)
        assert type(alone.optimizer) is keras.optimizers.Adam
        assert [np.asarray(a).tobytes() for a in alone.optimizer.variables] == [
            np.asarray(a).tobytes() for a in interrupted.optimizer.variables
        ]
        loaded = load_model(path, compression=LHC(), sparse_as_dense=True)
        assert isinstance(loaded.optimizer, keras.optimizers.Adam)
        interrupted.save_weights(os.path.join(directory, "only.weights.h5"))
        raised(ConfigError, lambda: load_model(_saved_without_optimizer(directory)))
    for model in (straight, loaded):
        model.fit(second, verbose=0)
    weights = [[array.tobytes() for array in model.get_weights()] for model in (straight, loaded)]
    if hvd.size() == 2:  # with more, a dense sum is rounded after each addition, in an order of Horovod's own
        assert weights[0] == weights[1]
    same_everywhere(weights[0], "loaded weights")


def _saved_without_optimizer(directory: str) -> str:
    path = os.path.join(directory, "bare.keras")
    build_model().save(path)
    return path


@case(2, 3, 4)
def broadcast_of_initial_weights() -> None:
    """All ranks begin with rank 0's weights and optimizer state, built beforehand or not; local variables are left alone."""
    for built in (True, False):
        layers = [keras.layers.Embedding(ROWS, ROW), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential(layers)
        if built:
            model.build((None, 3))
        optimizer = DistributedOptimizer(keras.optimizers.Adam(0.01 * (hvd.rank() + 1)), compression=LHC(), sparse_as_dense=True)
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(batches(6), verbose=0, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
        same_everywhere([array.tobytes() for array in model.get_weights()], f"broadcast weights {built}")
        assert float(optimizer.learning_rate.numpy()) == np.float32(0.01)
    model = build_model()
    bias = model.layers[-1].bias
    model.compile(DistributedOptimizer(sgd(), sparse_as_dense=True), "mse", jit_compile=False)
    bias.assign([float(hvd.rank())])
    callback = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[bias])
    model.fit(batches(1), verbose=0, callbacks=[callback])
    biases = hvd.allgather_object(float(bias.numpy()[0]), name="biases")
    assert len(set(biases)) == hvd.size(), biases


@case(2, 3, 4)
def average_of_metrics() -> None:
    """Later callbacks, and the history, see the mean over the ranks."""
    model = build_model()
    model.compile(DistributedOptimizer(sgd(), sparse_as_dense=True), "mse", metrics=["mae"], jit_compile=False)
    own: dict[str, float] = {}
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.update(logs))
    history = model.fit(batches(4), verbose=0, callbacks=[keep, callbacks.MetricAverageCallback()]).history
    everybody = hvd.allgather_object(own, name="own metrics")
    assert set(own) == {"loss", "mae"} and everybody[0] != everybody[1]
    for name in own:
        mean = np.mean([each[name] for each in everybody])
        assert np.isclose(history[name][0], mean, rtol=1e-12), (history, everybody)
    same_everywhere(history, "history")
