"""State of an elastic job for Keras 3; Horovod's ``TensorFlowKerasState`` is for Keras 2."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
from horovod.common.elastic import ObjectState

from hvd_lhc.tensorflow.keras.variables import tf_variable

__all__ = ["KerasState"]


class KerasState(ObjectState):  # type: ignore[misc]
    """What all ranks of an elastic job have in common: a model, its optimizer and objects of yours.

    ::

        state = KerasState(model, optimizer, batch=0, epoch=0)
        state.register_reset_callbacks([Compression.lhc.reset])

        @hvd.elastic.run
        def train(state): ...

    Args:
        model: of Keras 3, built.
        optimizer: of Keras 3, built; default: the one that the model was compiled with, if any.
        kwargs: further attributes of the state, kept in step with it.

    Raises:
        ValueError: the model or its optimizer has no variables yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        for what, one in (("model", self.model), ("optimizer", self.optimizer)):
            if one is not None and not one.built:
                raise ValueError(f"the {what} has to be built first: call {what}.build(...)")
        self._saved: list[Any] = []
        self._save_variables()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Keep copies of all variables and objects."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for variable, value in zip(self._variables(), self._saved, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take variables and objects of rank 0."""
        hvd.broadcast_variables(self._variables(), root_rank=0)
        self._save_variables()
        super().sync()

    def _variables(self) -> list[Any]:
        optimizer = [] if self.optimizer is None else self.optimizer.variables
        return [tf_variable(variable) for variable in (*self.model.weights, *optimizer)]

    def _save_variables(self) -> None:
        self._saved = [variable.numpy() for variable in self._variables()]
