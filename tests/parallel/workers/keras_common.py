"""What the Keras cases share: starting and meeting, a model and its data.

With ``TF_USE_LEGACY_KERAS=1`` Keras is ``tf_keras``, version 2, and the optimizer Horovod's; otherwise Keras 3 and ours.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from exact import generator
from steps import count
from tensorflow_common import PAIR, meet, same_everywhere, start

if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
    import tf_keras as keras
    from horovod.tensorflow.keras import DistributedOptimizer

    COMPILE: dict[str, Any] = {}
else:
    import keras

    from hvd_lhc.tensorflow.keras import DistributedOptimizer

    COMPILE = {"jit_compile": False}

__all__ = ["PAIR", "batches", "build_model", "check_fit", "count", "fit", "initial_weights", "meet", "start"]

ROWS, ROW = 4000, 16
SAMPLES, WORDS = 8, 3


def build_model() -> Any:
    """A table of words, and a linear layer on the mean of the rows of a sample's words."""
    layers = keras.layers
    model = keras.Sequential([layers.Embedding(ROWS, ROW), layers.GlobalAveragePooling1D(), layers.Dense(1)])
    model.build((None, WORDS))
    random = generator("weights")
    model.set_weights([random.normal(size=weight.shape).astype(np.float32) for weight in model.get_weights()])
    return model


def initial_weights() -> list[bytes]:
    """The bits of the weights that training starts from."""
    return [weight.tobytes() for weight in build_model().get_weights()]


def batches(steps: int) -> Any:
    """What this rank trains on."""
    random = generator("batches", hvd.rank())
    words = random.integers(0, ROWS, (steps * SAMPLES, WORDS))
    targets = random.normal(size=(steps * SAMPLES, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((words, targets)).batch(SAMPLES, drop_remainder=True)


def fit(optimizer: Any, compression: Any, steps: int, compile_options: dict[str, Any], **options: Any) -> list[bytes]:
    """Train with ``model.fit`` and return the bits of the weights.

    Args:
        optimizer: of Keras.
        compression: as for Horovod.
        steps: how many.
        compile_options: further options of ``model.compile``.
        options: further options of ``DistributedOptimizer``.
    """
    model = build_model()
    options = {"sparse_as_dense": True, **options}
    distributed = DistributedOptimizer(optimizer, compression=compression, **options)
    model.compile(distributed, "mse", **COMPILE | compile_options)
    model.fit(batches(steps), epochs=1, verbose=0)
    return [weight.tobytes() for weight in model.get_weights()]


def check_fit(
    name: str, make: Any, lhc: Any, steps: int = 20, compile_options: dict[str, Any] | None = None, **options: Any
) -> dict[str, int]:
    """Fit with compression; returns how many tensors went which way.

    Weights and counts are the same on all ranks; with two ranks, weights have the bits of fitting without compression.
    """
    weights = fit(make(), lhc, steps, compile_options or {}, **options)
    happened = count(lhc)
    assert not set(weights) & set(initial_weights()), f"{name}: fit left a weight as it was"
    same_everywhere([hashlib.sha256(bits).hexdigest() for bits in weights], f"{name} weights")
    same_everywhere(happened, f"{name} statistics")
    if hvd.size() == 2:
        plain = fit(make(), hvd.Compression.none, steps, compile_options or {}, **options)
        assert weights == plain, f"{name}: weights differ with and without compression"
    return happened
