"""The kernel and the reference, written apart from each other from one document, give the same bits."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import VALUES, Array, BarePlan, cases, draw_gradients, plan_fields, unhurried

from hvd_lhc import Codec, ConfigError, DecodeError, Plan, WireError, reference

if TYPE_CHECKING:
    from collections.abc import Callable


def outcome(decode: Callable[[], tuple[Array, Any]]) -> tuple[Any, ...]:
    """What decoding comes to, in a form that can be compared: the bits and the header, or the refusal."""
    try:
        values, header = decode()
    except WireError:
        return ("WireError",)
    except DecodeError as error:
        return error.reason, plain(error.header)
    return values.view(np.uint32).tolist(), plain(header)


def plain(header: Any) -> dict[str, Any] | None:
    """The fields of either header, the factor as a float."""
    return None if header is None else {**vars(header), "factor": float(header.factor)}


def both_outcomes(plan: Plan, wire: Array, dtype: str = "float32") -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The kernel's and the reference's."""

    def by_kernel() -> tuple[Array, Any]:
        decoded = Codec(plan).decode_with_facts(wire, dtype=dtype)
        return decoded.values, decoded.header

    return outcome(by_kernel), outcome(
        lambda: (reference.decode(plan, wire, dtype), reference.read_header(plan, wire))
    )


@unhurried
@given(
    cases((*VALUES, "any bits")),
    st.sampled_from(["lossless", "bounded"]),
    st.integers(1, 2),
    st.integers(-148, 128) | st.integers(-20, 24),
    st.booleans(),
    st.data(),
)
def test_kernel_and_reference_agree(
    case: tuple[Plan, list[Array]], precision: str, parts: int, exponent: int, named: bool, data: st.DataObject
) -> None:
    """Wires, results, headers and reasons of refusals are equal, whether or not the plan fits, whatever the scale."""
    fitting, gradients = case
    plan = replace(
        fitting,
        capacity=max(1, fitting.capacity // data.draw(st.sampled_from([1, 3]), "capacity is too small by")),
        index=data.draw(st.sampled_from([fitting.index, fitting.index, "none"]), "index"),
        parts=parts,
        exponent=data.draw(st.sampled_from([fitting.exponent, exponent]), "exponent"),
        precision=precision,
        probe_block=1 + fitting.numel // 3,
    )
    codec = Codec(plan)
    total = np.zeros(plan.wire_size)
    for number, x in enumerate(gradients):
        rank = number if named else None
        wire = codec.encode(x, rank=rank)
        np.testing.assert_array_equal(wire.view(np.uint64), reference.encode(plan, x, rank).view(np.uint64))
        total += wire
    scale = data.draw(st.sampled_from([1, 1 / plan.world_size, 1 / 3, 2.0**-40]), "scale")
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]), "dtype")
    by_kernel, by_reference = both_outcomes(plan, total * scale, dtype)
    assert by_kernel == by_reference


@unhurried
@given(cases(), st.data())
def test_kernel_and_reference_agree_on_ranks_that_joined_out(
    case: tuple[Plan, list[Array]], data: st.DataObject
) -> None:
    """Any of the ranks may be missing from the sum or the average, and one may be there twice."""
    plan, gradients = case
    present = data.draw(st.lists(st.integers(0, plan.world_size - 1), max_size=plan.world_size), "ranks")
    total = np.zeros(plan.wire_size)
    for rank in present:
        total += Codec(plan).encode(gradients[rank], rank=rank)
    by_kernel, by_reference = both_outcomes(plan, total / data.draw(st.sampled_from([1, plan.world_size, 3]), "divisor"))
    assert by_kernel == by_reference


@unhurried
@given(cases(), st.data())
def test_kernel_and_reference_refuse_the_same_wires(case: tuple[Plan, list[Array]], data: st.DataObject) -> None:
    """After damage to one number, both refuse, or both return the same bits."""
    plan, gradients = case
    total = np.sum([Codec(plan).encode(x, rank=r) for r, x in enumerate(gradients)], axis=0)
    front = plan.layout.header_size + plan.layout.bitmap_size
    position = data.draw(
        st.integers(0, front - 1) | st.integers(0, plan.wire_size - 1) | st.sampled_from(np.flatnonzero(total).tolist()),
        "position",
    )
    total[position] += data.draw(
        st.sampled_from([1, -1, -total[position], 0.2, -0.2, 0.3, 0.5, 2.0**51 + 1, 2.0**53, np.nan, np.inf, -np.inf]), "damage"
    )
    by_kernel, by_reference = both_outcomes(plan, total)
    if isinstance(by_kernel[0], str) and isinstance(by_reference[0], str):
        return  # which of several failed checks is named depends on their order
    assert by_kernel == by_reference


@pytest.mark.parametrize("index", ["keyed", "bitmap"])
@pytest.mark.parametrize(("world_size", "participants"), [(64, 64), (64, 63), (4096, 4096), (4096, 3)])
def test_kernel_and_reference_agree_with_many_ranks(index: str, world_size: int, participants: int) -> None:
    """Large jobs: the counts of 4096 ranks fit the cells, and the sum is exact."""
    rng = np.random.default_rng(world_size + participants)
    plan = Plan(numel=60, world_size=world_size, capacity=20, index=index, block=3, exponent=2, parts=2, seed=7)
    codec = Codec(plan)
    patterns = draw_gradients(rng, plan, 16, "alternating", "random", 1.0)
    total = np.zeros(plan.wire_size)
    for rank in range(participants):
        wire = codec.encode(patterns[rank % 16], rank=rank)
        total += wire
        if rank in (0, participants // 2, participants - 1):
            np.testing.assert_array_equal(wire, reference.encode(plan, patterns[rank % 16], rank))
    for wire in (total, total / world_size):
        by_kernel, by_reference = both_outcomes(plan, wire)
        assert by_kernel == by_reference
    times = [len(range(pattern, participants, 16)) for pattern in range(16)]
    for i, value in enumerate(codec.decode(total)):
        exact = sum(Fraction(float(x[i])) * n for x, n in zip(patterns, times, strict=True))
        assert float(value) == reference.round_once(exact, "float32")


@unhurried
@given(plan_fields())
def test_kernel_and_reference_agree_on_plans(fields: dict[str, Any]) -> None:
    """The same plans are possible, and lay out the same wire."""
    try:
        geometry = reference.geometry(BarePlan(**fields))
    except ConfigError:
        with pytest.raises(ConfigError):
            Plan(**fields)
        return
    layout = Plan(**fields).layout
    assert (layout.wire_size, layout.header_size, layout.bitmap_size) == (
        geometry.wire_size,
        geometry.header_size,
        geometry.bitmap_cells,
    )
    assert (layout.key_count, layout.segment_bits, layout.segments, layout.cell_count) == (
        geometry.keys,
        geometry.segment_bits,
        geometry.start_segments,
        geometry.cells,
    )
    assert (layout.cell_bits, layout.value_bits, layout.unit_exponent) == (
        geometry.cell_bits,
        geometry.value_bits,
        geometry.unit_exponent,
    )
    assert (layout.index_lanes, layout.cell_stride) == (geometry.index_lanes, geometry.cell_size)


@pytest.mark.parametrize("index", ["keyed", "bitmap"])
def test_keys_that_cancel_in_every_cell_are_not_taken_for_zeros(index: str) -> None:
    """Four keys in six cells, two in each, with values that sum to zero there: no cell is pure, and both refuse."""
    plan = Plan(numel=4096, world_size=1, capacity=8, index=index, exponent=2)
    x = np.zeros(4096, np.float32)
    x[[0, 2877]], x[[591, 2413]] = 1, -1
    wire = Codec(plan).encode(x, rank=0)
    if index == "bitmap":
        assert not wire[plan.layout.header_size + plan.layout.bitmap_size :].any()
    by_kernel, by_reference = both_outcomes(plan, wire)
    assert by_kernel == by_reference and by_kernel[0] == "unpeeled"
