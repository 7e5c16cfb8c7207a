"""The planner: pure functions, fed with agreed facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_lhc import ConfigError, Plan
from hvd_lhc.planner import first_state, next_state
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor, cheapest_plan, roomiest
from hvd_lhc.state import Facts, State, merge

TABLE = Tensor(numel=100_000 * 64, row=64, element_bytes=4)
VECTOR = Tensor(numel=1_000_000, row=1, element_bytes=4)
SETTINGS = Settings()


def facts(**fields: object) -> Facts:
    """Facts of a quiet step, with some fields changed."""
    quiet = Facts(
        reason=None,
        union_keys=1000,
        nonzero_elements=4000,
        nonzero_keys=4000,
        nonzero_rows=4000,
        inexact_single=0,
        magnitude_exponent=0,
    )
    return replace(quiet, **fields)  # type: ignore[arg-type]


def sketch_state(tensor: Tensor = VECTOR, world_size: int = 4, **fields: object) -> State:
    """The state after a probe that found ``facts``."""
    return next_state(first_state(tensor, world_size, SETTINGS), facts(**fields), tensor, world_size, SETTINGS)


def plan_of(state: State) -> Plan:
    """The plan of a sketch state."""
    assert state.kind == "sketch" and state.plan is not None
    return state.plan


def test_small_tensors_never_carry_a_header() -> None:
    """Below min_numel, and with one rank, a tensor goes dense for good."""
    small = Tensor(numel=SETTINGS.min_numel - 1, row=1, element_bytes=4)
    for tensor, world_size in ((small, 4), (VECTOR, 1)):
        state = first_state(tensor, world_size, SETTINGS)
        for _ in range(1000):
            assert state.kind == "dense"
            state = next_state(state, None, tensor, world_size, SETTINGS)


def test_a_probe_that_finds_few_nonzeros_leads_to_a_sketch() -> None:
    """Capacity covers the sum of the ranks' nonzeros, since their union isn't known yet."""
    plan = plan_of(sketch_state())
    assert plan.capacity >= 4000 and plan.index == "keyed" and plan.parts == 2
    assert plan.exponent >= 1


def test_a_dense_tensor_goes_dense_and_is_probed_again_ever_more_rarely() -> None:
    """The schedule of probes doubles from an eighth of ``reprobe_steps`` to 16 times as many."""
    state = first_state(VECTOR, 4, SETTINGS)
    waits = []
    for _ in range(10):
        state = next_state(state, facts(nonzero_elements=4_000_000), VECTOR, 4, SETTINGS)
        steps = 0
        while state.kind == "dense":
            state = next_state(state, None, VECTOR, 4, SETTINGS)
            steps += 1
        assert state.kind == "probe"
        waits.append(steps)
    assert waits == [8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_rows_are_found_without_being_told() -> None:
    """Where nonzeros come in rows, a row becomes a key."""
    state = sketch_state(TABLE, nonzero_elements=4 * 5000 * 64, nonzero_rows=4 * 5000)
    assert plan_of(state).block == 64
    scattered = sketch_state(TABLE, nonzero_elements=4 * 5000, nonzero_rows=4 * 5000)
    assert plan_of(scattered).block == 1


def test_index_follows_the_number_of_bytes() -> None:
    """Few keys: keyed; many keys of a small space: bitmap."""
    assert plan_of(sketch_state(nonzero_elements=4000)).index == "keyed"
    dense_enough = sketch_state(nonzero_elements=4 * 80_000)
    after = next_state(dense_enough, facts(union_keys=80_000, nonzero_keys=4 * 80_000), VECTOR, 4, SETTINGS)
    assert plan_of(after).index == "bitmap"


def test_the_first_capacity_shrinks_as_soon_as_the_union_is_known() -> None:
    """The upper bound from a probe is replaced after one verified step."""
    state = sketch_state()
    after = next_state(state, facts(union_keys=1000), VECTOR, 4, SETTINGS)
    assert 1000 < plan_of(after).capacity < 1500 and plan_of(state).capacity > 4000


def test_the_first_capacity_does_not_shrink_below_what_the_probe_asked_for() -> None:
    """A step with fewer keys follows a probe with more, or a refusal: their capacity is estimated by its overlap."""
    state = sketch_state(nonzero_elements=4000)
    after = next_state(state, facts(union_keys=250, nonzero_keys=1000, nonzero_elements=1000), VECTOR, 4, SETTINGS)
    assert 1000 < plan_of(after).capacity < 1500 and not after.provisional


def test_densities_in_turn_cost_one_refusal() -> None:
    """Two optimizers share a site, one with thrice the keys of the other: the capacity settles on the denser one."""
    state = next_state(sketch_state(nonzero_elements=400), facts(union_keys=400, nonzero_keys=400), VECTOR, 4, SETTINGS)
    refusals = 0
    for step in range(40):
        keys = 1200 if step % 2 else 400
        refused = keys > plan_of(state).capacity
        refusals += refused
        told = facts(reason="unpeeled" if refused else None, union_keys=0 if refused else keys, nonzero_keys=keys)
        state = next_state(state, told, VECTOR, 4, SETTINGS)
    assert refusals == 1


@pytest.mark.parametrize(
    ("reason", "check"),
    [
        ("over_capacity", lambda old, new: new.capacity > old.capacity),
        ("unpeeled", lambda old, new: new.seed != old.seed),
    ],
)
def test_a_refusal_is_answered_by_a_plan_that_fits(reason: str, check: object) -> None:
    """Each reason changes what it names."""
    state = next_state(sketch_state(), facts(union_keys=1000), VECTOR, 4, SETTINGS)
    refused = facts(reason=reason, union_keys=0, nonzero_keys=9000)
    after = next_state(state, refused, VECTOR, 4, SETTINGS)
    assert check(plan_of(state), plan_of(after))  # type: ignore[operator]


#: What a header tells of the odd first steps of a training run.
ODD = {
    "zeros": {"union_keys": 0, "nonzero_elements": 0, "nonzero_keys": 0, "nonzero_rows": 0, "magnitude_exponent": None},
    "a few": {"union_keys": 3, "nonzero_elements": 3, "nonzero_keys": 3, "nonzero_rows": 3},
    "few and huge": {"union_keys": 3, "nonzero_elements": 3, "nonzero_keys": 3, "nonzero_rows": 3, "magnitude_exponent": 17},
    "huge": {"magnitude_exponent": 17},
    "tiny": {"magnitude_exponent": -60},
    "dense": {
        "union_keys": TABLE.numel,
        "nonzero_elements": 4 * TABLE.numel,
        "nonzero_keys": 4 * TABLE.numel,
        "nonzero_rows": 4 * 100_000,
    },
    "not a number": {"reason": "nonfinite"},
    "refused for nothing": {"reason": "parity"},
}


def told_by(state: State, rows: int, **fields: object) -> Facts:
    """Facts of a step of TABLE under the state's plan: refused as the kernel would; by default of so many whole rows."""
    told = facts(nonzero_elements=4 * rows * 64, nonzero_rows=4 * rows, union_keys=rows, nonzero_keys=4 * rows)
    plan = state.plan
    if plan is not None and plan.block == 1 and "nonzero_elements" not in fields:
        told = replace(told, union_keys=64 * told.union_keys, nonzero_keys=64 * told.nonzero_keys)
    told = replace(told, **fields)  # type: ignore[arg-type]
    if state.kind == "sketch" and plan is not None and told.reason is None:
        if told.magnitude_exponent is not None and told.magnitude_exponent > plan.exponent:
            told = replace(told, reason="overflow")
        elif told.nonzero_keys > 4 * plan.capacity:
            told = replace(told, reason="over_capacity")
        elif told.union_keys > plan.capacity:
            told = replace(told, reason="unpeeled")
    return told if told.reason is None else replace(told, union_keys=0)


@pytest.mark.parametrize("odd_steps", [1, 2])
@pytest.mark.parametrize("before", [0, 1, 40])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_early_step_does_not_send_a_tensor_dense_for_long(name: str, before: int, odd_steps: int) -> None:
    """Whatever a step was like that differs from those after it, within 16 of these the tensor is compressed."""
    state = first_state(TABLE, 4, SETTINGS)
    for _ in range(before):
        state = next_state(state, told_by(state, 5000), TABLE, 4, SETTINGS)
    for _ in range(odd_steps):
        state = next_state(state, told_by(state, 5000, **ODD[name]) if state.kind != "dense" else None, TABLE, 4, SETTINGS)
    for step in range(32):
        told = told_by(state, 5000) if state.kind != "dense" else None
        verified = state.kind == "sketch" and told is not None and told.reason is None
        assert verified or step < 16, (step, state)
        state = next_state(state, told, TABLE, 4, SETTINGS)


def test_one_refusal_repairs_all_that_the_next_step_would_be_refused_for() -> None:
    """Elements that have outgrown the exponent hide keys that have outgrown the capacity."""
    state = quiet_steps(sketch_state(), 40)
    both = facts(reason="overflow", union_keys=0, nonzero_keys=9000, nonzero_elements=9000, magnitude_exponent=4)
    plan = plan_of(next_state(state, both, VECTOR, 4, SETTINGS))
    assert plan.exponent > 4 and plan.capacity >= 9000


def test_nonfinite_gradients_change_nothing() -> None:
    """NaN says nothing about the plan; loss scaling makes them on purpose."""
    state = next_state(sketch_state(), facts(union_keys=1000), VECTOR, 4, SETTINGS)
    assert next_state(state, facts(reason="nonfinite", union_keys=0), VECTOR, 4, SETTINGS) == state


def test_three_refusals_in_a_row_end_on_the_dense_path() -> None:
    """A tensor that no plan fits doesn't pay for a wire and a dense reduction for ever."""
    state = sketch_state()
    for _ in range(3):
        state = next_state(state, facts(reason="unpeeled", nonzero_keys=4000), VECTOR, 4, SETTINGS)
    assert state.kind == "dense"


def quiet_steps(state: State, steps: int, **fields: object) -> State:
    """The state after so many verified steps with 1000 keys."""
    for _ in range(steps):
        state = next_state(state, facts(**fields), VECTOR, 4, SETTINGS)
    return state


def test_one_part_after_a_quiet_time_and_later_after_a_relapse() -> None:
    """Two parts become one after 256 quiet steps, and after 512 when that was too early; where it saves anything."""
    state = next_state(sketch_state(nonzero_elements=90_000), facts(union_keys=90_000, nonzero_keys=90_000), VECTOR, 4, SETTINGS)
    assert plan_of(state).index == "bitmap" and plan_of(state).parts == 2
    many = {"union_keys": 90_000, "nonzero_keys": 90_000}
    for expected in (256, 512):
        steps = 0
        while plan_of(state).parts == 2:
            state = quiet_steps(state, 1, **many)
            steps += 1
        assert expected - 2 <= steps <= expected
        state = next_state(state, facts(reason="inexact", union_keys=0, inexact_single=1), VECTOR, 4, SETTINGS)
        assert plan_of(state).parts == 2


def test_two_parts_stay_where_one_saves_nothing() -> None:
    """A keyed wire has the same size with both."""
    state = quiet_steps(next_state(sketch_state(), facts(), VECTOR, 4, SETTINGS), 1000)
    plan = plan_of(state)
    assert plan.parts == 2 and replace(plan, parts=1).wire_size == plan.wire_size


def test_elements_below_two_parts_end_on_the_dense_path() -> None:
    """No plan holds them."""
    state = quiet_steps(sketch_state(), 5)
    for _ in range(3):
        state = next_state(state, facts(reason="inexact", union_keys=0, inexact_single=1), VECTOR, 4, SETTINGS)
    assert state.kind == "dense"


def test_the_exponent_follows_the_largest_magnitude() -> None:
    """Up in the step after it grew, before anything overflows; down when it has been smaller for two periods."""
    state = quiet_steps(sketch_state(), 40)
    low = plan_of(state).exponent
    state = quiet_steps(state, 1, magnitude_exponent=2)
    assert plan_of(state).exponent == low + 2
    state = quiet_steps(state, 10)
    assert plan_of(state).exponent == low + 2
    state = quiet_steps(state, 40)
    assert plan_of(state).exponent == low


def test_one_outlier_does_not_move_the_exponent_and_two_do() -> None:
    """An exponent that is far too high would give most elements a low part."""
    state = quiet_steps(sketch_state(), 40)
    low = plan_of(state).exponent
    outlier = facts(reason="overflow", union_keys=0, magnitude_exponent=30)
    state = next_state(state, outlier, VECTOR, 4, SETTINGS)
    assert plan_of(state).exponent == low
    assert plan_of(next_state(state, outlier, VECTOR, 4, SETTINGS)).exponent > 30
    assert plan_of(quiet_steps(state, 10)).exponent == low
    slightly = facts(reason="overflow", union_keys=0, magnitude_exponent=4)
    assert plan_of(next_state(quiet_steps(state, 10), slightly, VECTOR, 4, SETTINGS)).exponent > 4


@pytest.mark.parametrize("reason", [None, "unpeeled"])
def test_an_exponent_under_which_most_elements_need_a_low_part_is_lowered_at_once(reason: str | None) -> None:
    """After large gradients come small ones: that doubles the keys, for one step."""
    state = sketch_state(magnitude_exponent=30)
    assert plan_of(state).exponent > 30
    small = facts(reason=reason, union_keys=0 if reason else 1000, inexact_single=3000)
    after = next_state(state, small, VECTOR, 4, SETTINGS)
    assert plan_of(after).exponent < 10


def test_a_larger_union_is_followed_at_once_and_a_smaller_one_when_it_pays() -> None:
    """The wire grows after one step above its capacity, shrinks within a few periods, and then more slowly after a relapse."""
    state = quiet_steps(sketch_state(), 50)
    small = plan_of(state).wire_size
    waits = []
    for _ in range(3):
        refused = facts(reason="over_capacity", union_keys=0, nonzero_keys=40_000, nonzero_elements=40_000)
        state = next_state(state, refused, VECTOR, 4, SETTINGS)
        assert plan_of(state).capacity >= 40_000
        state = quiet_steps(state, 2, union_keys=10_000, nonzero_keys=40_000, nonzero_elements=40_000)
        assert 10_000 < plan_of(state).capacity < 20_000
        waits.append(0)
        while plan_of(state).wire_size > small:
            state = quiet_steps(state, 1)
            waits[-1] += 1
        assert waits[-1] < 500
    assert waits[0] <= waits[1] <= waits[2], waits


def shrunk(union_of_step: Callable[[int], int]) -> tuple[State, int]:
    """The state after a capacity for 3,000 keys became a smaller one, and the former capacity."""
    state = quiet_steps(sketch_state(), 40, union_keys=3000)
    former = plan_of(state).capacity
    for step in range(2000):
        state = next_state(state, facts(union_keys=union_of_step(step), nonzero_keys=4000), VECTOR, 4, SETTINGS)
        if plan_of(state).capacity < former:
            return state, former
    raise AssertionError("never shrunk")


def test_a_smaller_wire_has_room_for_the_largest_union_since_it_would_have_done() -> None:
    """Unions that come once in a few periods are not forgotten as soon as they are out of the demand."""
    state, former = shrunk(lambda step: 2000 if step == 40 else 1000)
    assert 2000 < plan_of(state).capacity < former


def test_a_shrink_that_was_too_early_is_taken_back() -> None:
    """The next refused union may be a small one of those to come: what was enough for long is the better guess."""
    state, former = shrunk(lambda step: 1000)
    refused = facts(reason="unpeeled", union_keys=0, nonzero_keys=12_000, nonzero_elements=12_000)
    state = next_state(quiet_steps(state, 20), refused, VECTOR, 4, SETTINGS)
    state = next_state(state, facts(union_keys=2000, nonzero_keys=12_000, nonzero_elements=12_000), VECTOR, 4, SETTINGS)
    assert plan_of(state).capacity >= former


def test_probes_back_off_where_gains_do_not_last() -> None:
    """A tensor that a probe takes for sparse, and that is refused each time, is probed less and less."""
    state, waits = first_state(VECTOR, 4, SETTINGS), []
    for _ in range(4):
        while state.kind != "dense":
            refused = facts(reason=None if state.kind == "probe" else "over_capacity", union_keys=0)
            state = next_state(state, refused, VECTOR, 4, SETTINGS)
        waits.append(state.steps_left)
        while state.kind == "dense":
            state = next_state(state, None, VECTOR, 4, SETTINGS)
    assert waits == [8, 16, 32, 64]


def test_the_exponent_leaves_overflow_to_the_dense_path() -> None:
    """No plan under which a sum of ranks could leave the dtype."""
    half = Tensor(numel=1_000_000, row=1, element_bytes=2, top_exponent=16)
    state = next_state(first_state(half, 4, SETTINGS), facts(magnitude_exponent=15), half, 4, SETTINGS)
    assert plan_of(state).exponent == 14


@pytest.mark.parametrize(
    "bad",
    [
        {"min_numel": 0},
        {"precision": "exact"},
        {"max_wire_ratio": 0.0},
        {"max_wire_ratio": 1.5},
        {"reprobe_steps": 0},
        {"fallback": "ignore"},
    ],
)
def test_settings_are_checked(bad: dict[str, object]) -> None:
    """Every option out of range is refused by name."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Settings(**bad)  # type: ignore[arg-type]


@given(st.integers(1, 2**24), st.sampled_from([1, 64]), st.sampled_from([1, 2]))
def test_capacities_use_what_the_wire_has(keys: int, block: int, parts: int) -> None:
    """The cheapest plan holds the keys, and no larger capacity has a wire of its size."""
    plan = cheapest_plan(TABLE, 4, SETTINGS, block, keys, 4, parts, 0)
    assert plan is not None and plan.capacity >= keys
    assert roomiest(plan) == plan
    assert replace(plan, capacity=plan.capacity + 1).wire_size > plan.wire_size


random_facts = st.builds(
    Facts,
    reason=st.sampled_from([None, None, None, "nonfinite", "overflow", "inexact", "over_capacity", "unpeeled", "parity"]),
    union_keys=st.integers(0, 2_000_000),
    nonzero_elements=st.integers(0, 8_000_000),
    nonzero_keys=st.integers(0, 8_000_000),
    nonzero_rows=st.integers(0, 8_000_000),
    inexact_single=st.integers(0, 1),
    magnitude_exponent=st.none() | st.integers(-145, 128),
)


@given(
    st.lists(random_facts, max_size=60),
    st.sampled_from([TABLE, VECTOR, Tensor(numel=3_000_000, row=30_000, element_bytes=2, top_exponent=16)]),
    st.sampled_from([2, 3, 8, 64, 4096]),
    st.sampled_from([Settings(), Settings(precision="bounded", max_wire_ratio=1.0)]),
)
def test_any_history_gives_valid_equal_plans(
    history: list[Facts], tensor: Tensor, world_size: int, settings: Settings
) -> None:
    """Two planners fed with the same facts agree, no history raises, and no plan costs more than dense."""
    one = two = first_state(tensor, world_size, settings)
    for item in history:
        one = next_state(one, item if one.kind != "dense" else None, tensor, world_size, settings)
        two = next_state(two, item if two.kind != "dense" else None, tensor, world_size, settings)
        assert one == two
        if one.kind == "sketch":
            assert plan_of(one).wire_bytes <= tensor.dense_bytes * max(1.0, 1.2 * settings.max_wire_ratio)


@given(st.lists(random_facts, min_size=1, max_size=6).flatmap(lambda f: st.tuples(st.just(f), st.permutations(f))))
def test_merging_does_not_depend_on_order(lists: tuple[list[Facts], list[Facts]]) -> None:
    """Ranks may see the tensors of a step in different order."""
    assert merge(lists[0]) == merge(lists[1])
