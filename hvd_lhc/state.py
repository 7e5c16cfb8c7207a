"""What the planner knows: the facts of a step, read out of the same wire by all ranks, and the state that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_lhc.demand import Demand
from hvd_lhc.plan import Plan

__all__ = ["SINGLE_PART_AFTER_STEPS", "SOON", "Facts", "State", "merge"]

#: Who needs more room within so many steps of a shrink shrank too early.
SOON = 1024
#: One part again after so many steps without an element that needs two (doubled after every relapse).
SINGLE_PART_AFTER_STEPS = 256


@dataclass(frozen=True)
class Facts:
    """What all ranks learned from one reduced wire (or, by :func:`merge`, from several of one step).

    Attributes:
        reason: ``None`` for a verified decode, else why it was refused (``DecodeError.reason``).
        union_keys: distinct nonzero keys of a verified decode, else 0.
        nonzero_elements: over all ranks, elements counted once per rank.
        nonzero_keys: the same of the plan's keys.
        nonzero_rows: the same of rows.
        inexact_single: elements that need a low part (or would, with two parts).
        magnitude_exponent: every element is below two to this; ``None``: all are zero.
    """

    reason: str | None
    union_keys: int
    nonzero_elements: int
    nonzero_keys: int
    nonzero_rows: int
    inexact_single: int
    magnitude_exponent: int | None


@dataclass(frozen=True)
class State:
    """What happens to a tensor in the next step, and what is remembered for the steps after it.

    Attributes:
        kind: ``"probe"`` (a header alone, then a dense reduction), ``"sketch"`` or ``"dense"`` (no header at all).
        plan: the plan of the wire; ``None`` for ``"dense"``.
        steps_left: dense: steps until the next probe.
        probes_in_vain: probes so far that found nothing to gain, or no lasting gain.
        proven_steps: sketch: steps in a row that were verified.
        refusal_points: how much it has been refused of late.
        overlap: the union's keys and those of all ranks together, when a sketch went dense since they were too many (0, 0 if
            none of its steps was verified), and none has lasted since.
        demand: what the last verified steps needed.
        waste: bytes that the plan has cost more than a smaller one that would have done.
        wanted: the least capacity of the next plan: the largest that a review found good since the plan began to be too large,
            or the one before a shrink that was too early.
        former_capacity: the capacity before the last shrink.
        hasty: how many times in a row a smaller plan was taken too early.
        steps_since_shrink: steps since that happened last.
        single_steps: steps in a row in which one part would have done.
        single_wait: how many of them it takes.
        provisional: the capacity comes from an upper bound, not from a union that was seen.
        expected_keys: provisional: ``Facts.nonzero_keys`` of the step that the capacity was made for.
    """

    kind: str
    plan: Plan | None = None
    steps_left: int = 0
    probes_in_vain: int = 0
    proven_steps: int = 0
    refusal_points: int = 0
    overlap: tuple[int, int] | None = None
    demand: Demand = field(default_factory=Demand)
    waste: int = 0
    wanted: int = 0
    former_capacity: int = 0
    hasty: int = 0
    steps_since_shrink: int = SOON
    single_steps: int = 0
    single_wait: int = SINGLE_PART_AFTER_STEPS
    provisional: bool = False
    expected_keys: int = 0


def merge(facts: Sequence[Facts]) -> Facts:
    """One set of facts for several tensors that share a plan in a step: the most demanding of each.

    The order doesn't matter, since ranks may see them in different order.
    """
    reasons = sorted(f.reason for f in facts if f.reason is not None)
    magnitudes = [f.magnitude_exponent for f in facts if f.magnitude_exponent is not None]
    return Facts(
        reason=reasons[0] if reasons else None,
        union_keys=max(f.union_keys for f in facts),
        nonzero_elements=max(f.nonzero_elements for f in facts),
        nonzero_keys=max(f.nonzero_keys for f in facts),
        nonzero_rows=max(f.nonzero_rows for f in facts),
        inexact_single=max(f.inexact_single for f in facts),
        magnitude_exponent=max(magnitudes, default=None),
    )
