"""``DistributedOptimizer`` for Keras 3: reduces gradients in ``apply``, which every way to train with Keras 3 calls."""

from __future__ import annotations

import sys
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.tensorflow.compression import Compression as _HorovodCompression
from tensorflow.python.ops import control_flow_util

from hvd_lhc.errors import ConfigError, UnsupportedError
from hvd_lhc.tensorflow.keras.accumulation import Accumulation
from hvd_lhc.tensorflow.keras.variables import tf_variable

__all__ = ["DistributedOptimizer", "load_model"]

#: A module of Keras whose optimizer calls another one only on ranks whose gradients are finite.
_LOSS_SCALING = "keras.src.optimizers.loss_scale_optimizer"


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = _HorovodCompression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """An optimizer like the one given, that reduces gradients over all ranks before it applies them.

    For Keras 3, in ``model.fit`` (with ``model.compile(..., jit_compile=False)``), ``train_on_batch`` and loops of your own
    that call ``optimizer.apply`` or ``apply_gradients``. State that the given optimizer has is taken over. Models are
    saved as with the given optimizer, and load without Horovod; see :func:`load_model`.

    An optimizer of ``tf_keras`` (Keras 2) is handed to ``horovod.tensorflow.keras.DistributedOptimizer``.

    Args:
        optimizer: a Keras optimizer. For mixed precision with float16, a ``keras.optimizers.LossScaleOptimizer``.
        name: prefix of the names of Horovod's operations; default ``Distributed`` and the class of the optimizer.
        device_dense, device_sparse: devices to reduce on.
        compression: of ``hvd_lhc.tensorflow.Compression``, an ``LHC`` or one of Horovod's.
        sparse_as_dense: turn ``tf.IndexedSlices`` (of embedding layers) into dense gradients, which a compressor sees.
            Without that Horovod gathers them from all ranks, uncompressed.
        gradient_predivide_factor: as in Horovod.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: so many calls of ``apply`` add up their gradients on each rank, and the last one of them
            reduces and applies the sum. ``optimizer.iterations`` counts what was applied.
        average_aggregated_gradients: divide that sum by their number.
        groups: as in Horovod; lists hold variables of TensorFlow or of Keras.
        process_set: the ranks that reduce.

    Raises:
        UnsupportedError: ``op`` is another one.
        ConfigError: an argument is out of range.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return _for_keras_2(locals())
    if op not in (hvd.Average, hvd.Sum):
        raise UnsupportedError(
            "the DistributedOptimizer of Keras reduces gradients with op=hvd.Average or op=hvd.Sum only, as Horovod's does."
        )
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step must be 1 or more, not {backward_passes_per_step}")
    base = type(optimizer)
    if issubclass(base, _Distributed):
        raise ConfigError("the optimizer is a DistributedOptimizer already: give it the optimizer that it was made of")
    cls: Any = type(base.__name__, (_Distributed, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    distributed = cls.from_config(optimizer.get_config())
    distributed._set_reduction(
        hvd._make_allreduce_grads_fn(
            name or f"Distributed{base.__name__}",
            device_dense,
            device_sparse,
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            [[tf_variable(one) for one in group] for group in groups] if isinstance(groups, list) else groups,
            process_set,
        ),
        Accumulation(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense),
    )
    if optimizer.built:
        distributed.build(optimizer._trainable_variables)
        for mine, given in zip(distributed.variables, optimizer.variables, strict=True):
            mine.assign(given)
    return distributed


def load_model(filepath: Any, custom_objects: dict[str, Any] | None = None, **options: Any) -> Any:
    """A saved model, with its optimizer and that one's state, which reduces over all ranks from now on.

    Args:
        filepath: as for ``keras.models.load_model``.
        custom_objects: the same.
        options: of :func:`DistributedOptimizer`.

    Raises:
        ConfigError: the model was saved without an optimizer.
    """
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            f"the model in {filepath} was saved without an optimizer: load it with keras.models.load_model, and compile it"
        )
    model.optimizer = DistributedOptimizer(model.optimizer, **options)
    return model


class _Distributed:
    """What a distributed optimizer does otherwise than the class that it is made of, which comes second among its bases."""

    def _set_reduction(self, reduce: Any, accumulation: Accumulation) -> None:
        self._reduce_over_ranks = reduce
        self._accumulation = accumulation

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce gradients over all ranks, and update variables.

        Args:
            grads: of this rank, one per variable; ``None`` where there is none, on all ranks alike.
            trainable_variables: default: those that the optimizer was built for.

        Raises:
            UnsupportedError: within a function that XLA compiles, or within another optimizer that scales the loss.
        """
        _refuse_xla()
        _refuse_loss_scaling(self)
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        if len(grads) != len(variables):
            raise ConfigError(f"{len(grads)} gradients for {len(variables)} variables")
        if trainable_variables is not None and not self.built:  # type: ignore[attr-defined]
            with keras.name_scope(self.name, caller=self):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]
        self._accumulation.add(grads, variables, lambda sums: self._reduce_and_apply(sums, variables))

    def _reduce_and_apply(self, grads: list[Any], variables: list[Any]) -> None:
        reduced = self._reduce_over_ranks(grads, [tf_variable(variable) for variable in variables])
        super().apply(list(reduced), variables)  # type: ignore[misc]


def _for_keras_2(arguments: dict[str, Any]) -> Any:
    """Horovod's own optimizer, with the same arguments."""
    import horovod.tensorflow.keras as hvd_keras

    return hvd_keras.DistributedOptimizer(**arguments)


def _refuse_xla() -> None:
    """Raise within a function that XLA compiles, which Horovod's operations can't be part of."""
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            "Horovod can't reduce gradients within a function that XLA compiles, and Keras 3 compiles train steps with XLA "
            "by default where there is a GPU. Write model.compile(..., jit_compile=False), and take jit_compile=True off "
            "functions of your own."
        )


def _refuse_loss_scaling(optimizer: Any) -> None:
    """Raise if an optimizer that scales the loss is what calls: it does so on ranks only whose own gradients are finite."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _LOSS_SCALING and frame.f_locals.get("self", optimizer) is not optimizer:
            raise UnsupportedError(
                "a LossScaleOptimizer around a DistributedOptimizer leaves a step out on each rank by itself, so that ranks "
                "would wait for each other. Write DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...), "
                "which model.compile then takes as it is."
            )
        frame = frame.f_back  # type: ignore[assignment]
