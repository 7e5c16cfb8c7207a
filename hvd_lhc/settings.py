"""What a user may choose."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from hvd_lhc.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What a user may choose; equal on all ranks.

    Attributes:
        min_numel: smaller tensors are never compressed.
        precision: ``"lossless"`` or ``"bounded"`` (see :class:`~hvd_lhc.plan.Plan`).
        max_wire_ratio: a sketch is used only while it has at most this share of the dense tensor's bytes.
        reprobe_steps: a tensor that went dense is looked at again after an eighth of so many steps, then after twice as many
            each time, up to 16 times ``reprobe_steps``.
        fallback: what to do with a sketch that can't be verified: ``"dense"`` reduces the original gradient dense,
            ``"error"`` raises :class:`~hvd_lhc.errors.DecodeError`, on all ranks.
    """

    min_numel: int = 16_384
    precision: str = "lossless"
    max_wire_ratio: float = 0.5
    reprobe_steps: int = 64
    fallback: str = "dense"

    def __post_init__(self) -> None:
        self._require_whole_number("min_numel", "elements")
        self._require_whole_number("reprobe_steps", "steps")
        self._require_one_of("precision", "lossless", "bounded")
        self._require_one_of("fallback", "dense", "error")
        ratio: Any = self.max_wire_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < float(ratio) <= 1:
            raise ConfigError(
                f"max_wire_ratio must be a number above 0 and at most 1, not {ratio!r}: write LHC(max_wire_ratio=0.5)"
            )

    def _require_whole_number(self, name: str, unit: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            default = type(self).__dataclass_fields__[name].default
            raise ConfigError(f"{name} must be a whole number of {unit}, at least 1, not {value!r}: write LHC({name}={default})")

    def _require_one_of(self, name: str, *choices: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in choices:
            listed = " or ".join(map(repr, choices))
            raise ConfigError(f"{name} must be {listed}, not {value!r}: write LHC({name}={choices[0]!r})")
