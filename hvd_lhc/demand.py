"""How many keys a tensor's recent steps had, and how many the next ones may have. Exact integers, pure functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_lhc.state import Facts

__all__ = ["Demand", "first_guess"]

#: Steps of a period. What is remembered are the current and the last period.
_PERIOD = 16
#: With fewer steps than this their spread means nothing.
_FEW_STEPS = 8


def first_guess(keys: int) -> int:
    """Room for the steps after one that had so many keys, when nothing else is known: an eighth and two standard deviations."""
    return keys + keys // 8 + 2 * isqrt(keys) + 4


@dataclass(frozen=True)
class _Period:
    """Sums over the steps of a period.

    Attributes:
        steps: how many so far.
        union, squares, peak: the union's keys, summed, squared and summed, at most.
        keys, elements, rows: nonzero ones, counted once per rank, summed.
        magnitude: every element is below two to this; ``None``: all are zero.
    """

    steps: int = 0
    union: int = 0
    squares: int = 0
    peak: int = 0
    keys: int = 0
    elements: int = 0
    rows: int = 0
    magnitude: int | None = None

    def after(self, facts: Facts) -> _Period:
        return _Period(
            self.steps + 1,
            self.union + facts.union_keys,
            self.squares + facts.union_keys**2,
            max(self.peak, facts.union_keys),
            self.keys + facts.nonzero_keys,
            self.elements + facts.nonzero_elements,
            self.rows + facts.nonzero_rows,
            _larger(self.magnitude, facts.magnitude_exponent),
        )


@dataclass(frozen=True)
class Demand:
    """What the last 16 to 32 verified steps needed."""

    current: _Period = field(default_factory=_Period)
    last: _Period = field(default_factory=_Period)

    def after(self, facts: Facts) -> Demand:
        """One verified step later."""
        if self.current.steps == _PERIOD:
            return Demand(_Period().after(facts), self.current)
        return Demand(self.current.after(facts), self.last)

    @property
    def steps(self) -> int:
        """Steps that are remembered."""
        return self.current.steps + self.last.steps

    @property
    def is_end_of_period(self) -> bool:
        """A time to look whether the plan still suits."""
        return self.current.steps == _PERIOD

    @property
    def magnitude(self) -> int | None:
        """Every element of these steps is below two to this; ``None``: all are zero."""
        return _larger(self.current.magnitude, self.last.magnitude)

    @property
    def least_capacity(self) -> int:
        """With less, more than about one step in 500 would have too many keys: mean and 3 standard deviations."""
        return max(self._peak, self._mean_and(3))

    @property
    def good_capacity(self) -> int:
        """What lasts for a while: mean and 4 standard deviations, and a deviation above the largest union seen."""
        if self.steps < _FEW_STEPS:
            return first_guess(self._peak)
        return max(self._peak + self._mean_and(1) - self._mean_and(0), self._mean_and(4)) + 4

    def of_other_keys(self, keys: int, elements_per_key: bool) -> int:
        """Keys of the other kind, elements or rows, for so many keys; by the ratio of the ranks' own counts."""
        own = self.current.keys + self.last.keys
        other = self.current, self.last
        counts = sum(p.elements if elements_per_key else p.rows for p in other)
        return -(-keys * counts // own) if own else keys

    @property
    def overlap(self) -> tuple[int, int]:
        """The keys of all unions, and those of all ranks, each counted once per step that has them."""
        return self.current.union + self.last.union, self.current.keys + self.last.keys

    def union_of(self, nonzero_keys: int) -> int:
        """How large the union of so many keys, counted once per rank, would be if ranks shared as much as they did."""
        union, keys = self.overlap
        return -(-nonzero_keys * union // keys) if keys else nonzero_keys

    @property
    def _peak(self) -> int:
        return max(self.current.peak, self.last.peak)

    def _mean_and(self, deviations: int) -> int:
        steps = max(1, self.steps)
        total = self.current.union + self.last.union
        spread = isqrt(max(0, steps * (self.current.squares + self.last.squares) - total**2))  # steps * deviation
        return -(-(total + deviations * spread) // steps)


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
