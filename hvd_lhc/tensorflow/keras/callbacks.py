"""Callbacks for ``model.fit`` under Horovod, for Keras 3 and, with ``TF_USE_LEGACY_KERAS=1``, for ``tf_keras``.

Horovod's own ones are for Keras 2, and fail where Keras 3 is installed beside it.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_lhc.tensorflow.keras.variables import tf_variable

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """All ranks begin with the weights, and the optimizer's state, of one rank.

    Broadcast before the first step if the model and its optimizer have variables on every rank by then; otherwise after
    the first step, which has made them.

    Args:
        root_rank: whose variables.
        local_variables: variables that are not broadcast.
        process_set: the ranks among which to broadcast.
    """

    def __init__(self, root_rank: int, *, local_variables: Any = (), process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._local = {tf_variable(variable).ref() for variable in local_variables}
        self._process_set = process_set
        self._is_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if there is something to broadcast on every rank."""
        built = int(self.model.built and getattr(self.model.optimizer, "built", False))
        everywhere = hvd.allreduce(
            tf.constant(built), name="hvd_lhc.keras.built", op=hvd.Min, process_set=self._process_set
        )
        if not self._is_done and int(everywhere):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first step, unless that has happened before it."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer.variables
        variables = [*self.model.weights, *(optimizer() if callable(optimizer) else optimizer)]
        variables = [one for one in map(tf_variable, variables) if one.ref() not in self._local]
        hvd.broadcast_variables(variables, root_rank=self._root_rank, process_set=self._process_set)
        self._is_done = True


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over the ranks.

    It has to stand before all callbacks that read metrics (``ReduceLROnPlateau``, ``EarlyStopping``, ``CSVLogger`` ...).
    Every rank must have the same metrics.

    Args:
        process_set: the ranks over which to average.
    """

    def __init__(self, *, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the numbers in ``logs`` by their averages."""
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if not logs or not names:
            return
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        averages = hvd.allreduce(
            values, name="hvd_lhc.keras.metrics", op=hvd.Average, process_set=self._process_set
        ).numpy()
        logs.update(zip(names, averages.tolist(), strict=True))
