"""Horovod for Keras 3, whose optimizers ``horovod.tensorflow.keras`` does not reduce; with and without compression.

Usage: ``optimizer = hvd_lhc.tensorflow.keras.DistributedOptimizer(optimizer, compression=Compression.lhc)``
"""

from __future__ import annotations

from hvd_lhc.tensorflow import LHC, Compression
from hvd_lhc.tensorflow.keras import callbacks, elastic
from hvd_lhc.tensorflow.keras.optimizer import DistributedOptimizer, load_model

__all__ = ["LHC", "Compression", "DistributedOptimizer", "callbacks", "elastic", "load_model"]
