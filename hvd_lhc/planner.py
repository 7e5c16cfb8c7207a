"""Whether to compress a tensor and with what: facts in, plans out.

Every function here is pure. A plan must be the same on all ranks although no rank knows what the others hold, so the
next :class:`State` follows from the current one and from :class:`Facts`: exact integers that every rank read out of the
*same reduced wire*. Nothing local to a rank (its own counts, clocks, float sums) may enter. See ``docs/planner.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_lhc.errors import ConfigError
from hvd_lhc.plan import Plan
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor, cheapest_plan, grid_capacity, grow_plan, header_plan

__all__ = ["Facts", "State", "first_state", "merge", "next_state"]

#: The exponent is lowered only when it is this far above the largest magnitude seen.
_EXPONENT_SLACK = 16
#: A capacity is lowered only after so many steps in which a smaller one would have done.
_SHRINK_AFTER_STEPS = 16
#: Two lanes become one again after so many steps without an element that needs two (doubled after every relapse).
_SINGLE_LANE_AFTER_STEPS = 64
#: A refusal costs as many points as it takes verified steps to earn back; with too many the tensor goes dense. Three
#: refusals in a row are too many, and so is one in fewer than every four steps in the long run.
_POINTS_PER_REFUSAL = 4
_POINTS_UNTIL_DENSE = 12


@dataclass(frozen=True)
class Facts:
    """What all ranks learned from one reduced wire (or, by :func:`merge`, from several of one step).

    Attributes:
        reason: ``None`` for a verified decode, else why it was refused (``DecodeError.reason``).
        union_keys: distinct nonzero keys of a verified decode, else 0.
        nonzero_elements: over all ranks, elements counted once per rank.
        nonzero_keys: the same of the plan's keys.
        nonzero_rows: the same of rows.
        inexact_single: elements that a single value lane couldn't hold.
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
        probes_in_vain: dense: probes so far that found nothing to gain.
        refusal_points: sketch: how much it has been refused of late.
        roomy_steps, roomy_keys: steps in a row in which a smaller capacity would have done, and the largest union in them.
        single_steps: steps in a row in which one lane would have done.
        single_wait: how many of them it takes.
        provisional: the capacity comes from an upper bound, not from a union that was seen.
        expected_keys: provisional: ``Facts.nonzero_keys`` of the step that the capacity was made for.
    """

    kind: str
    plan: Plan | None = None
    steps_left: int = 0
    probes_in_vain: int = 0
    refusal_points: int = 0
    roomy_steps: int = 0
    roomy_keys: int = 0
    single_steps: int = 0
    single_wait: int = _SINGLE_LANE_AFTER_STEPS
    provisional: bool = False
    expected_keys: int = 0


def first_state(tensor: Tensor, world_size: int, settings: Settings) -> State:
    """The state before anything is known: a probe, or dense for tensors too small or too large to sketch."""
    if tensor.numel < settings.min_numel or world_size < 2:
        return State("dense", steps_left=-1)
    try:
        plan = header_plan(tensor, world_size, settings)
    except ConfigError:
        return State("dense", steps_left=-1)
    return State("probe", plan)


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


def next_state(state: State, facts: Facts | None, tensor: Tensor, world_size: int, settings: Settings) -> State:
    """The state of the next step.

    Args:
        state: the state of the step that just ended.
        facts: what its wires told; ``None`` for a dense step.
        tensor, world_size, settings: as in :func:`first_state`.
    """
    if state.kind == "dense" or facts is None:
        return _after_dense(state, tensor, world_size, settings)
    if state.kind == "probe":
        return _after_probe(state, facts, tensor, world_size, settings)
    if facts.reason is not None:
        return _after_refusal(state, facts, tensor, world_size, settings)
    return _after_success(state, facts, tensor, world_size, settings)


def _go_dense(state: State, settings: Settings) -> State:
    wait = settings.reprobe_steps << min(state.probes_in_vain, 4)
    return State("dense", steps_left=wait, probes_in_vain=state.probes_in_vain + 1)


def _after_dense(state: State, tensor: Tensor, world_size: int, settings: Settings) -> State:
    if state.steps_left < 0:  # for good
        return state
    if state.steps_left > 1:
        return replace(state, steps_left=state.steps_left - 1)
    return State("probe", header_plan(tensor, world_size, settings), probes_in_vain=state.probes_in_vain)


def _after_probe(state: State, facts: Facts, tensor: Tensor, world_size: int, settings: Settings) -> State:
    if facts.reason == "nonfinite":  # says nothing about sparsity; look again
        return state
    # Ranks may share all their nonzeros or none: with luck the union is the average of the ranks, at worst the sum.
    luck = -(-facts.nonzero_elements // world_size), -(-facts.nonzero_rows // world_size)
    exponent = tensor.roomy_exponent(facts.magnitude_exponent, world_size)
    hopeful = cheapest_plan(tensor, world_size, settings, luck, exponent, lanes=1, seed=0)
    if hopeful is None:
        return _go_dense(state, settings)
    worst = grow_plan(hopeful, facts.nonzero_rows if hopeful.block > 1 else facts.nonzero_elements)
    plan = worst if worst is not None and worst.wire_bytes <= tensor.dense_bytes else hopeful
    expected = facts.nonzero_rows if plan.block > 1 else facts.nonzero_elements
    return State("sketch", plan, provisional=True, expected_keys=expected)


def _after_refusal(state: State, facts: Facts, tensor: Tensor, world_size: int, settings: Settings) -> State:
    """The step was saved by a dense reduction; find a plan under which the next one fits."""
    plan = _plan_of(state)
    if facts.reason == "nonfinite":  # the gradient's fault (loss scaling does this), not the plan's
        return state
    points = state.refusal_points + _POINTS_PER_REFUSAL
    if points >= _POINTS_UNTIL_DENSE:
        return _go_dense(state, settings)
    state = replace(state, refusal_points=points, single_steps=0, roomy_steps=0, roomy_keys=0)
    exponent = max(plan.exponent, tensor.roomy_exponent(facts.magnitude_exponent, world_size))
    if facts.reason == "overflow":
        return replace(state, plan=replace(plan, exponent=exponent))
    if facts.reason == "inexact":
        wait = min(2 * state.single_wait, 64 * _SINGLE_LANE_AFTER_STEPS)
        wider = replace(plan, value_lanes=2)
        if wider.wire_bytes > settings.max_wire_ratio * tensor.dense_bytes:
            return state  # one lane and a retry now and then, as long as that's rare
        return replace(state, plan=wider, single_wait=wait)
    # Too many keys for the table, or bad luck in hashing, or (never seen) a wire damaged on all ranks alike.
    most = min(facts.nonzero_keys, plan.key_count)
    bigger = grow_plan(plan, most) if most > plan.capacity else plan
    if bigger is None:
        return _go_dense(state, settings)
    if bigger.wire_bytes > tensor.dense_bytes and most > plan.capacity:
        return _go_dense(state, settings)
    plan = replace(bigger, seed=(plan.seed + 1) % 2**64)
    return replace(state, plan=plan, provisional=True, expected_keys=facts.nonzero_keys)


def _after_success(state: State, facts: Facts, tensor: Tensor, world_size: int, settings: Settings) -> State:
    plan = _plan_of(state)
    state = replace(state, refusal_points=max(0, state.refusal_points - 1), probes_in_vain=0)
    if state.provisional:
        facts = _scaled(facts, state.expected_keys)
    wanted = grid_capacity(facts.union_keys)
    if wanted > plan.capacity or (state.provisional and wanted < plan.capacity):
        return _resize(state, plan, facts, facts.union_keys, tensor, world_size, settings)
    state = replace(state, provisional=False)

    if wanted < plan.capacity:
        keys = max(state.roomy_keys, facts.union_keys)
        state = replace(state, roomy_steps=state.roomy_steps + 1, roomy_keys=keys)
        if state.roomy_steps >= _SHRINK_AFTER_STEPS:
            return _resize(state, plan, facts, keys, tensor, world_size, settings)
    else:
        state = replace(state, roomy_steps=0, roomy_keys=0)
    return _settle_lanes(state, plan, facts, tensor, world_size)


def _scaled(facts: Facts, expected_keys: int) -> Facts:
    """What a step would have told with so many keys, if it had fewer: the ranks' overlap is taken to be the same.

    The step that asked for a capacity may be of another kind than the one after it (two optimizers in turn, say).
    """
    keys = facts.nonzero_keys
    if not keys or keys >= expected_keys:
        return facts

    def scale(count: int) -> int:
        return -(-count * expected_keys // keys)

    return replace(
        facts,
        union_keys=scale(facts.union_keys),
        nonzero_keys=expected_keys,
        nonzero_elements=scale(facts.nonzero_elements),
        nonzero_rows=scale(facts.nonzero_rows),
    )


def _settle_lanes(state: State, plan: Plan, facts: Facts, tensor: Tensor, world_size: int) -> State:
    """One lane again after a quiet time; a lower exponent when magnitudes have fallen far."""
    roomy = tensor.roomy_exponent(facts.magnitude_exponent, world_size)
    if facts.magnitude_exponent is not None and plan.exponent > roomy + _EXPONENT_SLACK:
        plan = replace(plan, exponent=roomy)
        return replace(state, plan=plan, single_steps=0)
    if plan.value_lanes == 1:
        return state
    quiet = 0 if facts.inexact_single else state.single_steps + 1
    if quiet >= state.single_wait:
        return replace(state, plan=replace(plan, value_lanes=1), single_steps=0)
    return replace(state, single_steps=quiet)


def _resize(
    state: State, plan: Plan, facts: Facts, union: int, tensor: Tensor, world_size: int, settings: Settings
) -> State:
    """Choose anew for the union that was seen; the other kind of key is estimated by the ranks' average overlap."""
    overlap = max(1, union), max(1, facts.nonzero_keys)
    if plan.block > 1:
        elements, rows = -(-facts.nonzero_elements * overlap[0] // overlap[1]), union
    else:
        elements, rows = union, -(-facts.nonzero_rows * overlap[0] // overlap[1])
    best = cheapest_plan(tensor, world_size, settings, (elements, rows), plan.exponent, plan.value_lanes, plan.seed)
    if best is None:
        return _go_dense(state, settings)
    same_keys = best.block == plan.block
    expected = 0 if same_keys else facts.nonzero_rows if best.block > 1 else facts.nonzero_elements
    return replace(
        state, plan=best, provisional=not same_keys, expected_keys=expected, roomy_steps=0, roomy_keys=0
    )


def _plan_of(state: State) -> Plan:
    if state.plan is None:
        raise AssertionError("a sketch has a plan")
    return state.plan
