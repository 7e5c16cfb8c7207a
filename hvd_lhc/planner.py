"""Whether to compress a tensor and with what: facts in, plans out.

Every function here is pure. A plan must be the same on all ranks although no rank knows what the others hold, so the
next :class:`State` follows from the current one and from :class:`Facts`: exact integers that every rank read out of the
*same reduced wire*. Nothing local to a rank (its own counts, clocks, float sums) may enter. See ``docs/planner.md``.
"""

from __future__ import annotations

from dataclasses import replace

from hvd_lhc.demand import Demand, first_guess
from hvd_lhc.errors import ConfigError
from hvd_lhc.plan import Plan
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor, cheapest_plan, grow_plan, header_plan
from hvd_lhc.state import SINGLE_PART_AFTER_STEPS, SOON, Facts, State

__all__ = ["first_state", "next_state"]

#: A refusal costs as many points as it takes verified steps to earn back; with too many the tensor goes dense. Three
#: refusals in a row are too many, and so is one in fewer than every four steps in the long run.
_POINTS_PER_REFUSAL = 4
_POINTS_UNTIL_DENSE = 12
#: A sketch that has become too large is kept until it exceeds ``max_wire_ratio`` by this factor.
_RATIO_SLACK = 1.2
#: Another plan has to save so many parts of the wire.
_LEAST_SAVING = 1 / 12
#: A smaller wire is taken once the larger one has cost so many dense reductions, one of which is what it costs to have taken
#: it too early. Doubled each time that it was, up to 16 times as much.
_PATIENCE = 2
#: A jump of the largest magnitude beyond the exponent by more powers of two than this is taken for an accident at first.
_MAGNITUDE_ACCIDENT = 4
#: The exponent is too high where it is this far above the largest magnitude, and so many of all elements need a low part.
_EXPONENT_SLACK = 4
_MOST_LOW_PARTS = 1 / 64
#: Probes that found something to gain count for nothing before so many verified steps.
_PROVEN_AFTER_STEPS = 64


def first_state(tensor: Tensor, world_size: int, settings: Settings) -> State:
    """The state before anything is known: a probe, or dense for tensors too small or too large to sketch."""
    if tensor.numel < settings.min_numel or world_size < 2:
        return State("dense", steps_left=-1)
    try:
        plan = header_plan(tensor, world_size, settings)
    except ConfigError:
        return State("dense", steps_left=-1)
    return State("probe", plan)


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
    longest = 16 * settings.reprobe_steps
    wait = min(max(1, settings.reprobe_steps // 8) << min(state.probes_in_vain, 16), longest)
    overlap = state.demand.overlap if state.kind == "sketch" else state.overlap
    return State("dense", steps_left=wait, probes_in_vain=state.probes_in_vain + 1, overlap=overlap)


def _after_dense(state: State, tensor: Tensor, world_size: int, settings: Settings) -> State:
    if state.steps_left < 0:  # for good
        return state
    if state.steps_left > 1:
        return replace(state, steps_left=state.steps_left - 1)
    return replace(state, kind="probe", plan=header_plan(tensor, world_size, settings), steps_left=0)


def _after_probe(state: State, facts: Facts, tensor: Tensor, world_size: int, settings: Settings) -> State:
    if facts.reason == "nonfinite":  # says nothing about sparsity; look again
        return state
    # Ranks may share all their nonzeros or none: with luck the union is the average of the ranks, at worst the sum. Where that
    # has led to nothing, they are expected to share as much as they did, or as ranks do that don't know of each other.
    counts = {1: facts.nonzero_elements}
    if tensor.has_rows:
        counts[tensor.row] = facts.nonzero_rows
    exponent = tensor.roomy_exponent(facts.magnitude_exponent, world_size)
    parts = 1 if settings.precision == "bounded" else 2

    def hope(block: int, count: int) -> int:
        average = -(-count // world_size)
        if state.overlap is None:
            return average
        union, keys = state.overlap
        return -(-count * union // keys) if keys else _independent_union(-(-tensor.numel // block), average, world_size)

    plans = [
        plan
        for block, count in counts.items()
        if (plan := cheapest_plan(tensor, world_size, settings, block, hope(block, count), exponent, parts, seed=0))
    ]
    hopeful = min(plans, key=lambda plan: plan.wire_size, default=None)
    if hopeful is None or hopeful.wire_bytes > _limit(tensor, settings):
        return _go_dense(state, settings)
    expected = counts[hopeful.block]
    worst = grow_plan(hopeful, first_guess(expected))
    plan = worst if worst is not None and worst.wire_bytes <= tensor.dense_bytes else hopeful
    return replace(state, kind="sketch", plan=plan, provisional=True, expected_keys=expected)


def _independent_union(keys: int, each: int, ranks: int) -> int:
    """How many of all keys at least one rank has, on average, if each rank draws so many of them."""
    others = int((keys - min(each, keys)) ** ranks) // int(keys ** (ranks - 1))
    return keys - others


def _after_refusal(state: State, facts: Facts, tensor: Tensor, world_size: int, settings: Settings) -> State:
    """The step was saved by a dense reduction; find a plan under which the next one fits."""
    plan = _plan_of(state)
    if facts.reason == "nonfinite":  # the gradient's fault (loss scaling does this), not the plan's
        return state
    repeated = state.refusal_points > 0
    points = state.refusal_points + _POINTS_PER_REFUSAL
    if points >= _POINTS_UNTIL_DENSE:
        return _go_dense(state, settings)
    state = replace(state, refusal_points=points, proven_steps=0, single_steps=0, waste=0, wanted=0)
    if state.demand.steps == 0:
        return _probed_by(facts, state, tensor, world_size, settings)
    exponent = tensor.roomy_exponent(facts.magnitude_exponent, world_size)
    if exponent > plan.exponent + _MAGNITUDE_ACCIDENT and state.demand.magnitude is not None and not repeated:
        return state
    lower = _lower_exponent(plan, facts, tensor, world_size)
    if facts.reason != "inexact" and lower is not plan:  # most keys were low parts
        return replace(state, plan=lower)
    # All that the next step would be refused for, whatever this one was.
    if facts.reason == "inexact":
        state = _after_inexact(state, plan, exponent, tensor, settings)
    plan = _plan_of(state)
    if exponent > plan.exponent:
        plan = replace(plan, exponent=exponent)
        state = replace(state, plan=plan)
    too_many = min(state.demand.union_of(facts.nonzero_keys), plan.key_count) > plan.capacity
    if facts.reason in ("overflow", "inexact") and not too_many:
        return state
    return _after_too_many_keys(state, plan, facts, tensor, world_size, settings)


def _probed_by(facts: Facts, state: State, tensor: Tensor, world_size: int, settings: Settings) -> State:
    """What a refused sketch tells of a step is what a probe would have told. Its plan may come from a step of another kind."""
    plan = _plan_of(state)
    after = _after_probe(replace(state, kind="probe"), facts, tensor, world_size, settings)
    if after.plan is None or facts.reason in ("overflow", "inexact"):
        return after
    if after.plan.capacity < after.expected_keys:  # no room for all, and what there was did not do
        return _go_dense(state, settings)
    return replace(after, plan=replace(after.plan, seed=(plan.seed + 1) % 2**64))


def _after_inexact(state: State, plan: Plan, exponent: int, tensor: Tensor, settings: Settings) -> State:
    if plan.parts == 2:  # some are so small that even two parts don't reach them
        return replace(state, plan=replace(plan, exponent=min(plan.exponent, exponent)))
    try:
        wider = replace(plan, parts=2)
    except ConfigError:  # twice the keys are too many for a keyed index of this size
        wider = None
    if wider is None or wider.wire_bytes > _RATIO_SLACK * _limit(tensor, settings):
        return state  # one part and a retry now and then, as long as that's rare
    return replace(state, plan=wider, single_wait=min(2 * state.single_wait, 16 * SINGLE_PART_AFTER_STEPS))


def _after_too_many_keys(
    state: State, plan: Plan, facts: Facts, tensor: Tensor, world_size: int, settings: Settings
) -> State:
    """Too many keys for the table, or bad luck in hashing, or (never seen) a wire damaged on all ranks alike.

    For one step there is room for all that the ranks may have; then the union is known.
    """
    soon = state.steps_since_shrink < SOON
    state = replace(
        state,
        wanted=state.former_capacity if soon else 0,
        hasty=min(state.hasty + 1, 4) if soon else 0,
        steps_since_shrink=SOON,
        provisional=True,
        expected_keys=facts.nonzero_keys,
    )
    plan = replace(plan, seed=(plan.seed + 1) % 2**64)
    most = min(facts.nonzero_keys, plan.key_count)
    likely = min(most, first_guess(state.demand.union_of(facts.nonzero_keys)))
    for keys in (most, likely):
        bigger = grow_plan(plan, max(keys, plan.capacity))
        if bigger is not None and bigger.wire_bytes <= tensor.dense_bytes:
            return replace(state, plan=bigger)
    other = _probed_by(facts, state, tensor, world_size, settings)
    return _go_dense(state, settings) if other.plan is None else replace(other, demand=Demand())


def _after_success(state: State, facts: Facts, tensor: Tensor, world_size: int, settings: Settings) -> State:
    proven = state.proven_steps + 1
    state = replace(
        state,
        plan=_fit_exponent(_plan_of(state), facts, state.demand, tensor, world_size),
        refusal_points=max(0, state.refusal_points - 1),
        proven_steps=proven,
        probes_in_vain=0 if proven >= _PROVEN_AFTER_STEPS else state.probes_in_vain,
        overlap=None if proven >= _PROVEN_AFTER_STEPS else state.overlap,
        steps_since_shrink=min(state.steps_since_shrink + 1, SOON),
    )
    if state.provisional:
        state = replace(state, demand=Demand().after(_scaled(facts, state.expected_keys)), provisional=False, waste=0)
        return _suit(state, tensor, world_size, settings)
    state = _settle_parts(replace(state, demand=state.demand.after(facts)), facts)
    if state.demand.least_capacity > _plan_of(state).capacity:
        return _suit(state, tensor, world_size, settings)
    if state.demand.is_end_of_period:
        return _review(state, tensor, world_size, settings)
    return state


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


def _lower_exponent(plan: Plan, facts: Facts, tensor: Tensor, world_size: int) -> Plan:
    """The plan itself, or one with a lower exponent if far too many elements need a low part for its height."""
    exponent = tensor.roomy_exponent(facts.magnitude_exponent, world_size)
    if facts.magnitude_exponent is None or plan.exponent < exponent + _EXPONENT_SLACK:
        return plan
    if facts.inexact_single <= _MOST_LOW_PARTS * facts.nonzero_elements:
        return plan
    return replace(plan, exponent=exponent)


def _fit_exponent(plan: Plan, facts: Facts, demand: Demand, tensor: Tensor, world_size: int) -> Plan:
    """Room above the largest magnitude: more as soon as it grows, less when it has been smaller for a while."""
    exponent = tensor.roomy_exponent(facts.magnitude_exponent, world_size)
    if exponent > plan.exponent:
        return replace(plan, exponent=exponent)
    if demand.is_end_of_period and demand.magnitude is not None:
        exponent = max(exponent, tensor.roomy_exponent(demand.magnitude, world_size))
        return plan if exponent >= plan.exponent else replace(plan, exponent=exponent)
    return _lower_exponent(plan, facts, tensor, world_size)


def _settle_parts(state: State, facts: Facts) -> State:
    """One part again after a quiet time, if that makes the wire smaller."""
    plan = _plan_of(state)
    if plan.parts == 1:
        return state
    quiet = 0 if facts.inexact_single else state.single_steps + 1
    if quiet < state.single_wait:
        return replace(state, single_steps=quiet)
    single = replace(plan, parts=1)
    return replace(state, plan=single if single.wire_size < plan.wire_size else plan, single_steps=0)


def _with_same_keys(state: State, tensor: Tensor, world_size: int, settings: Settings) -> Plan | None:
    """The cheapest plan that suits the demand."""
    plan, keys = _plan_of(state), max(state.wanted, state.demand.good_capacity)
    return cheapest_plan(tensor, world_size, settings, plan.block, keys, plan.exponent, plan.parts, plan.seed)


def _with_other_keys(state: State, tensor: Tensor, world_size: int, settings: Settings) -> Plan | None:
    """The same with rows instead of elements, or the other way round; how many of them is an estimate."""
    if not tensor.has_rows:
        return None
    plan = _plan_of(state)
    block = tensor.row if plan.block == 1 else 1
    keys = state.demand.of_other_keys(max(state.wanted, state.demand.good_capacity), elements_per_key=block == 1)
    return cheapest_plan(tensor, world_size, settings, block, keys, plan.exponent, plan.parts, plan.seed)


def _saves_much(plan: Plan, other: Plan) -> bool:
    return plan.wire_size - other.wire_size >= _LEAST_SAVING * plan.wire_size


def _suit(state: State, tensor: Tensor, world_size: int, settings: Settings) -> State:
    """Take the plan that suits the demand, now."""
    for tried in (state, replace(state, wanted=0)):
        for find in (_with_same_keys, _with_other_keys):
            best = find(tried, tensor, world_size, settings)
            if best is not None and best.wire_bytes <= _RATIO_SLACK * _limit(tensor, settings):
                return _take(state, best)
    return _go_dense(state, settings)


def _review(state: State, tensor: Tensor, world_size: int, settings: Settings) -> State:
    """Take the plan that suits the demand, if it is smaller and that pays."""
    plan = _plan_of(state)
    best, other = (find(state, tensor, world_size, settings) for find in (_with_same_keys, _with_other_keys))
    if other is not None and (best is None or _saves_much(best, other)):
        best = other
    if best is None or not _saves_much(plan, best):
        return replace(state, waste=0, wanted=0)
    waste = state.waste + state.demand.current.steps * (plan.wire_bytes - best.wire_bytes)
    if waste < _PATIENCE * tensor.dense_bytes * 2**state.hasty:
        return replace(state, waste=waste, wanted=max(state.wanted, state.demand.good_capacity))
    return replace(_take(replace(state, former_capacity=plan.capacity), best), steps_since_shrink=0)


def _take(state: State, plan: Plan) -> State:
    if plan.block == _plan_of(state).block:
        return replace(state, plan=plan, waste=0, wanted=0)
    # The union of the other kind of key is an estimate.
    demand = state.demand
    sums, steps = (demand.current, demand.last), max(1, demand.steps)
    expected = -(-sum(p.rows if plan.block > 1 else p.elements for p in sums) // steps)
    hasty = min(state.hasty + 1, 4)  # so that estimates which are wrong in both directions don't go back and forth
    state = replace(state, plan=plan, waste=0, wanted=0, former_capacity=0, hasty=hasty)
    return replace(state, demand=Demand(), provisional=True, expected_keys=expected)


def _limit(tensor: Tensor, settings: Settings) -> float:
    """Bytes that a wire may have."""
    return settings.max_wire_ratio * tensor.dense_bytes


def _plan_of(state: State) -> Plan:
    if state.plan is None:
        raise AssertionError("a sketch has a plan")
    return state.plan
