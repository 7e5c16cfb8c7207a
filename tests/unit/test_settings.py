"""Options out of range, or of the wrong type: an error of ours that says what to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_lhc import ConfigError
from hvd_lhc.settings import Settings

NO_WHOLE_NUMBERS = ["1", 0, -5, 1.0, 1e4, True, None, [1], float("nan")]
NO_RATIOS = ["0.5", 0, -1, 1.5, True, None, float("nan"), float("inf"), 1j]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("min_numel", "reprobe_steps") for value in NO_WHOLE_NUMBERS]
    + [("max_wire_ratio", value) for value in NO_RATIOS]
    + [(name, value) for name in ("precision", "fallback") for value in ("", "exact", 1, None, ["dense"], True)],
)
def test_a_wrong_value_is_answered_by_what_to_write(name: str, value: Any) -> None:
    """The message names the option, shows what was given, and has a line to copy that works."""
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ") and repr(value) in message
    advice = message.rpartition("write LHC(")[2].rstrip(")")
    Settings(**{name: eval(advice.partition("=")[2])})  # the message is ours


def test_numbers_of_numpy_are_numbers() -> None:
    """Sizes are often computed by NumPy."""
    assert Settings(min_numel=np.int64(5), max_wire_ratio=np.float32(0.25)).min_numel == 5
