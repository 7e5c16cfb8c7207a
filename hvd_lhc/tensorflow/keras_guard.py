"""Refuses a combination in which Horovod itself trains without reducing anything."""

from __future__ import annotations

import sys

from hvd_lhc.errors import UnsupportedError

__all__ = ["refuse_broken_keras"]

_FRAMES_TO_LOOK_AT = 8


def refuse_broken_keras() -> None:
    """Raise if this is called while Horovod's Keras ``DistributedOptimizer`` wraps an optimizer of Keras 3.

    Horovod 0.28.1 overrides methods that Keras 3 never calls: the optimizer is built and trains, but no gradient is ever
    reduced and no compressor ever called. Making the optimizer is the only moment at which a compressor is touched.

    Raises:
        UnsupportedError: see above.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_LOOK_AT):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if frame.f_globals.get("__name__") != "horovod._keras" or "self" not in frame.f_locals:
            continue
        classes = type(frame.f_locals["self"]).__mro__
        if any(cls.__module__.startswith("keras.src.optimizers.base_optimizer") for cls in classes):
            raise UnsupportedError(
                "Horovod 0.28.1's Keras DistributedOptimizer reduces nothing under Keras 3: every rank would train alone. "
                "Use hvd_lhc.tensorflow.keras.DistributedOptimizer(optimizer, ...), which takes the same arguments and works "
                "with Keras 3; or hvd.DistributedGradientTape(tape, compression=...) in a custom loop; or Keras 2: "
                "pip install tf_keras, set TF_USE_LEGACY_KERAS=1 and take the optimizer from tf_keras."
            )
