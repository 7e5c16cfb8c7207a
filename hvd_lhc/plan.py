"""What shapes a wire: the :class:`Plan` that all ranks share."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from functools import cached_property

from hvd_lhc import _kernel
from hvd_lhc.errors import ConfigError

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a wire looks like; all ranks must hold the same. Frozen and validated.

    Attributes:
        numel: elements of the gradient.
        world_size: ranks whose wires are added, 1 to 4096.
        capacity: distinct keys, over all ranks together, that must fit, those of low parts included. Larger: a larger
            wire, fewer refusals.
        index: how decode learns which keys are there. ``"keyed"``: the cells carry it, about 16 to 32 bytes per key;
            ``"bitmap"``: 8 bytes per 21 keys (at 4 ranks) of the whole key space; ``"none"``: a header and no gradient.
        block: consecutive elements per key (a row of an embedding table, say); the last block may be short.
        parts: 1, or 2 where some elements differ so much in size from the largest that one cell can't hold them exactly:
            blocks with such elements are two keys, one for the high and one for the low part of their elements.
        exponent: every ``|x|`` on every rank is below ``2 ** exponent``.
        seed: selects the hash functions; another seed helps after a table could not be peeled.
        precision: ``"lossless"``: elements that can't be held exactly make decode refuse; ``"bounded"``: they are
            rounded to the nearest multiple of ``2 ** unit_exponent``, and counted.
        probe_block: nonzero blocks of so many elements are counted in the header (for the planner); 0 means ``block``.

    Raises:
        ConfigError: a field out of range, or a combination that can't fit; the message names the field to change.
    """

    numel: int
    world_size: int
    capacity: int = 1
    index: str = "keyed"
    block: int = 1
    parts: int = 1
    exponent: int = 0
    seed: int = 0
    precision: str = "lossless"
    probe_block: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                object.__setattr__(self, field.name, _as_int(field.name, getattr(self, field.name)))
        if self.index not in _kernel.INDEX_CODES:
            raise ConfigError(f"index must be one of {', '.join(_kernel.INDEX_CODES)}, not {self.index!r}")
        if self.precision not in _kernel.PRECISION_CODES:
            raise ConfigError(f"precision must be one of {', '.join(_kernel.PRECISION_CODES)}, not {self.precision!r}")
        if not self.probe_block:
            object.__setattr__(self, "probe_block", self.block)
        _ = self.layout  # validates the rest

    @cached_property
    def layout(self) -> _kernel.Layout:
        """The kernel's layout of this plan; for :class:`~hvd_lhc.codec.Codec`."""
        try:
            return _kernel.plan_layout(**{field.name: getattr(self, field.name) for field in fields(self)})
        except ConfigError as error:
            raise ConfigError(f"{error} ({self})") from None

    @property
    def wire_size(self) -> int:
        """Numbers (float64) in a wire. All that ranks must agree on for the reduction to work."""
        return self.layout.wire_size

    @property
    def wire_bytes(self) -> int:
        """Bytes of a wire."""
        return 8 * self.layout.wire_size

    @property
    def value_bits(self) -> int:
        """Bits of an element's value that its parts hold, sign not counted."""
        return self.parts * self.layout.value_bits

    @property
    def unit_exponent(self) -> int:
        """Values are counted in units of ``2 ** unit_exponent``."""
        return self.layout.unit_exponent

    @property
    def key_count(self) -> int:
        """Keys of the whole tensor: blocks, the last perhaps short, times ``parts``."""
        return self.layout.key_count

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)


def _as_int(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} must be an integer, not {value!r}") from None
