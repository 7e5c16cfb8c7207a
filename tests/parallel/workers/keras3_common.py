"""What the cases with Keras 3 share: the same as those with Keras 2."""

from __future__ import annotations

from keras_common import meet, start

__all__ = ["meet", "start"]
