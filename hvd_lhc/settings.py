"""What a user may choose."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_lhc.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What a user may choose; equal on all ranks.

    Attributes:
        min_numel: smaller tensors are never compressed.
        precision: ``"lossless"`` or ``"bounded"`` (see :class:`~hvd_lhc.plan.Plan`).
        max_wire_ratio: a sketch is used only while it has at most this share of the dense tensor's bytes.
        reprobe_steps: steps after which a dense tensor is looked at again; doubled each time, up to 16 times as many.
        fallback: what to do with a sketch that can't be verified: ``"dense"`` reduces the original gradient dense,
            ``"error"`` raises :class:`~hvd_lhc.errors.DecodeError`, on all ranks.
    """

    min_numel: int = 16_384
    precision: str = "lossless"
    max_wire_ratio: float = 0.5
    reprobe_steps: int = 64
    fallback: str = "dense"

    def __post_init__(self) -> None:
        if self.min_numel < 1:
            raise ConfigError(f"min_numel must be at least 1, not {self.min_numel!r}")
        if self.precision not in ("lossless", "bounded"):
            raise ConfigError(f"precision must be 'lossless' or 'bounded', not {self.precision!r}")
        if not 0 < self.max_wire_ratio <= 1:
            raise ConfigError(f"max_wire_ratio must lie above 0 and at most at 1, not {self.max_wire_ratio!r}")
        if self.reprobe_steps < 1:
            raise ConfigError(f"reprobe_steps must be at least 1, not {self.reprobe_steps!r}")
        if self.fallback not in ("dense", "error"):
            raise ConfigError(f"fallback must be 'dense' or 'error', not {self.fallback!r}")
