"""Sums of the gradients of several backward passes, kept on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_lhc.errors import UnsupportedError

__all__ = ["Accumulation"]


class Accumulation:
    """Hands on the sums of every ``passes`` gradients. They are no part of an optimizer's state, and aren't saved.

    Args:
        passes: how many; with 1, gradients are handed on as they are.
        average: divide the sums by it.
        sparse_as_dense: ``tf.IndexedSlices`` may be turned into dense gradients.
    """

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = passes
        self._divisor = passes if average else 1
        self._sparse_as_dense = sparse_as_dense
        self._sums: list[tf.Variable] = []
        self._count: tf.Variable | None = None

    def add(self, grads: list[Any], variables: list[Any], apply: Callable[[list[Any]], None]) -> None:
        """Add gradients; ``apply`` is called with the sums when there are enough of them.

        Args:
            grads: one per variable, ``None`` where there is none.
            variables: the same in every call.
            apply: what to do with the sums.

        Raises:
            UnsupportedError: sparse gradients, of several passes, that may not be made dense.
        """
        if self._passes == 1:
            apply(grads)
            return
        if not self._sparse_as_dense and any(isinstance(grad, tf.IndexedSlices) for grad in grads):
            raise UnsupportedError(
                "backward_passes_per_step > 1 adds up gradients, which needs dense ones: pass sparse_as_dense=True."
            )
        self._make_variables(variables)
        assert self._count is not None
        for total, grad in zip(self._sums, grads, strict=True):
            if grad is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(grad), total.dtype))
        is_last = self._count.assign_add(1) == self._passes

        def hand_on() -> tf.Tensor:
            apply([None if grad is None else total / self._divisor for total, grad in zip(self._sums, grads, strict=True)])
            for total in (*self._sums, self._count):
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        if tf.executing_eagerly():
            if is_last:
                hand_on()
        else:
            tf.cond(is_last, hand_on, lambda: tf.constant(False))

    def _make_variables(self, variables: list[Any]) -> None:
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False)
                self._sums = [tf.Variable(tf.zeros(one.shape, one.dtype), trainable=False) for one in variables]
