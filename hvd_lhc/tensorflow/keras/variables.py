"""Variables of Keras 3 and of TensorFlow."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["tf_variable"]


def tf_variable(variable: Any) -> Any:
    """The ``tf.Variable`` within a variable of Keras; one of TensorFlow is returned as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable
