"""An elastic job with TensorFlow and Keras 3: a callback tells the compressor that ranks have changed."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from elastic_model import ROW, ROWS, STEPS, STEPS_BETWEEN_COMMITS, gradient, happen, report

from hvd_lhc.tensorflow.keras import LHC, DistributedOptimizer
from hvd_lhc.tensorflow.keras.elastic import KerasState


def main() -> None:
    """Train, report."""
    hvd.init()
    lhc = LHC()
    model = keras.Sequential([keras.layers.Embedding(ROWS, ROW, embeddings_initializer="zeros")])
    model.build((None, 1))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=lhc, op=hvd.Sum)
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(gradient: Any) -> None:
        optimizer.apply([gradient], model.trainable_variables)

    state = KerasState(model, optimizer, step=0, history=[])
    state.register_reset_callbacks([lhc.reset])

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.step < STEPS:
            happen(state.step, hvd.rank(), hvd.size())
            step(tf.constant(gradient(state.step, hvd.rank())))
            state.history = [*state.history, (state.step, hvd.size())]
            state.step += 1
            if state.step % STEPS_BETWEEN_COMMITS == 0:
                state.commit()

    train(state)
    report(hvd.rank(), np.asarray(model.get_weights()[0]), state.history, lhc.statistics.sketches)


if __name__ == "__main__":
    main()
