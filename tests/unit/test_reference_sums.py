"""The reference's sums, roundings, scales and refusals against arithmetic that shares no code with it."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Array, BarePlan, sparse, total_of, unhurried

from hvd_lhc import ConfigError, DecodeError, WireError, reference

# Section 7: rounding, and sums


def value_of(bits: int, dtype: str) -> Fraction:
    """The number with this pattern of a nonnegative float; infinity counts as the power of two that it stands at."""
    mantissa, least = {"float32": (23, -149), "float16": (10, -24), "bfloat16": (7, -133)}[dtype]
    exponent, fraction = divmod(bits, 2**mantissa)
    return (fraction + (2**mantissa if exponent else 0)) * Fraction(2) ** (least + max(exponent - 1, 0))


INFINITY_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


@unhurried
@given(st.sampled_from(sorted(INFINITY_BITS)), st.data())
def test_rounding_is_to_nearest_ties_to_even(dtype: str, data: st.DataObject) -> None:
    """Between any two neighbours of any format, subnormal or the last before infinity."""
    last = INFINITY_BITS[dtype] - 1
    bits = data.draw(st.integers(0, last) | st.sampled_from([0, 1, last - 1, last]))
    below, above = value_of(bits, dtype), value_of(bits + 1, dtype)
    part = data.draw(st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(1)]) | st.fractions(0, 1))
    up = part > Fraction(1, 2) or (part == Fraction(1, 2) and bits % 2 == 1)
    expected = math.inf if up and bits == last else float(above if up else below)
    exact = below + part * (above - below)
    assert reference.round_once(exact, dtype) == expected
    assert reference.round_once(-exact, dtype) == -expected
    assert expected != 0 or math.copysign(1, reference.round_once(-exact, dtype)) == 1


@unhurried
@given(st.floats(width=64, allow_nan=False, allow_infinity=False) | st.floats(-1e5, 1e5) | st.floats(-1e-6, 1e-6))
def test_rounding_agrees_with_numpys_casts(value: float) -> None:
    """Casts of float64 to float32 and float16, and the usual integer trick from float32 to bfloat16."""
    with np.errstate(over="ignore", under="ignore"):
        single, half = np.float64(value).astype(np.float32), np.float64(value).astype(np.float16)
    assert reference.round_once(Fraction(value), "float32") == float(single)
    assert reference.round_once(Fraction(value), "float16") == float(half)
    if math.isfinite(single):
        word = int(single.view(np.uint32))
        word = (word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000
        assert reference.round_once(Fraction(float(single)), "bfloat16") == float(np.uint32(word).view(np.float32))


@unhurried
@given(st.data(), st.integers(1, 4), st.sampled_from(["keyed", "bitmap"]), st.sampled_from(sorted(INFINITY_BITS)))
def test_decoded_sums_are_the_exact_ones(data: st.DataObject, ranks: int, index: str, dtype: str) -> None:
    """Sum and Average over ranks, against fractions."""
    numel, block = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 4))
    plan = BarePlan(numel, ranks, 32, index, min(block, numel), 2, 12, seed=data.draw(st.integers(0, 99)))
    numbers = st.lists(st.sampled_from([0.0, -0.0]) | st.floats(-4094, 4094, width=16), min_size=numel, max_size=numel)
    gradients = [np.array(data.draw(numbers), np.float32) for _ in range(ranks)]
    total = total_of(plan, gradients)
    for wire, divisor in ((total, 1), (total / ranks, ranks)):
        try:
            decoded = reference.decode(plan, wire, dtype)
        except DecodeError:  # hashing may fail, if rarely; what else may is tested below
            continue
        for i, value in enumerate(decoded.tolist()):
            exact = sum(Fraction(float(x[i])) for x in gradients) / divisor
            assert value == reference.round_once(exact, dtype)
            assert value != 0 or math.copysign(1, value) == 1
        np.testing.assert_array_equal(decoded, reference.exact_sum(gradients, dtype, divisor))


@pytest.mark.parametrize("index", ["keyed", "bitmap"])
@pytest.mark.parametrize("keys", [16, 64, 100])
def test_full_tables_are_peeled(keys: int, index: str) -> None:
    """As many keys as capacity says, with seeds for which this succeeds: two or more keys in most cells."""
    for seed in range(4):
        plan = BarePlan(1000, capacity=keys, index=index, seed=seed)
        chosen = np.random.default_rng(seed).choice(1000, keys, replace=False).tolist()
        x, y = sparse(1000, {i: 1 + i / 8192 for i in chosen}), sparse(1000, dict.fromkeys(chosen[::2], -3.0))
        np.testing.assert_array_equal(reference.decode(plan, total_of(plan, [x, y])), x + y)


def test_bounded_plans_round_each_rank_to_the_nearest_unit() -> None:
    """Ties to even, on both sides of zero, and the header counts what was rounded."""
    plan = BarePlan(8, world_size=1, exponent=46, precision="bounded")  # one unit is 2
    x = np.array([1, 3, -1, -3, 4, 0.5, 7, -5.5], np.float32)
    wire = reference.encode(plan, x, 0)
    assert reference.decode(plan, wire).tolist() == [0, 4, 0, -4, 4, 0, 8, -6]
    assert reference.read_header(plan, wire).inexact == 7
    with pytest.raises(DecodeError, match="inexact=7"):
        reference.decode(plan._replace(precision="lossless"), reference.encode(plan._replace(precision="lossless"), x, 0))


def refusal(plan: BarePlan, wire: Array) -> str:
    """Why a wire is refused."""
    with pytest.raises(DecodeError) as caught:
        reference.decode(plan, wire)
    return caught.value.reason


# Section 6: the scale, and ranks that are not there


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("divided", [False, True])
def test_any_set_of_ranks_may_have_joined_out(world_size: int, divided: bool) -> None:
    """Every nonempty proper subset of the ranks is counted, and its sum is right; with Average divided by all."""
    plan = BarePlan(10, world_size=world_size)
    wires = [reference.encode(plan, sparse(10, {3: rank + 1}), rank) for rank in range(world_size)]
    for size in range(1, world_size):
        for ranks in itertools.combinations(range(world_size), size):
            wire = np.sum([wires[rank] for rank in ranks], axis=0) / (world_size if divided else 1)
            header = reference.read_header(plan, wire)
            assert (header.participants, header.scale) == (size, "average" if divided else "sum")
            expected = Fraction(sum(ranks) + size, world_size if divided else 1)
            assert reference.decode(plan, wire)[3] == reference.round_once(expected, "float32")


@pytest.mark.parametrize("ranks", [(0, 0), (2, 2), (0, 0, 1, 2), (0, 1, 2, 2), (1, 1, 1, 1), (0, 1, 2, 3, 3)])
def test_a_rank_that_is_counted_twice_is_no_sum(ranks: tuple[int, ...]) -> None:
    """The pilots tell ranks that are there twice from ranks that are not there."""
    plan = BarePlan(10, world_size=4)
    wire = np.sum([reference.encode(plan, sparse(10, {3: 1}), rank) for rank in ranks], axis=0)
    assert refusal(plan, wire) == "not_linear"


def test_unnamed_ranks_look_like_all_ranks() -> None:
    """N wires without a rank have the pilots of N named ones."""
    for n in (1, 2, 3, 4, 7, 4096):
        plan = BarePlan(10, world_size=n, index="none")
        wire = n * reference.encode(plan, sparse(10, {}), None)
        header = reference.read_header(plan, wire)
        assert (header.participants, header.scale) == (n, "sum")
        unit = reference.geometry(plan).pilot_unit
        assert wire[:3].tolist() == [n * unit, n * (n + 1) * (2 * n + 1) // 6 * unit, -n * (n + 1) // 2 * unit]


@pytest.mark.parametrize("scale", [1 / 3, 7.0, 1e-12, 2.0**40])
def test_another_scale_multiplies_the_result(scale: float) -> None:
    """A factor that is neither 1 nor 1 / N is found, and applied exactly."""
    plan = BarePlan(10, world_size=2)
    wire = total_of(plan, [sparse(10, {3: 1.5}), sparse(10, {3: 0.25, 4: 1})]) * scale
    header = reference.read_header(plan, wire)
    assert header.scale == "other" and float(header.factor) == pytest.approx(scale, rel=1e-15)
    assert reference.decode(plan, wire)[3] == reference.round_once(Fraction(7, 4) * header.factor, "float32")


# Refusals

BLOCKED = BarePlan(8, capacity=16, block=3)  # the last block lacks one element


def damage(plan: BarePlan, changes: dict[int, float]) -> str:
    """Why a good wire is refused after these numbers were added to it, with a checksum that agrees."""
    wire = total_of(plan, [sparse(8, {1: 1, 6: 2}), sparse(8, {6: 1})])
    reference.decode(plan, wire)
    g = reference.geometry(plan)
    for position, difference in changes.items():
        wire[position] += difference
        if position < g.header_size and position != 14 and difference % 1 == 0:
            wire[14] += (2 * position + 1) * difference % 2**32
    return refusal(plan, wire)


def place(plan: BarePlan, cell: int, lane: int) -> int:
    """Position in the wire of one number of a cell."""
    g = reference.geometry(plan)
    return g.table_start + cell * g.cell_size + lane


def test_damage_to_a_header_is_named() -> None:
    """Each field says what is wrong with it."""
    assert damage(BLOCKED, {1: 2.0**46}) == "not_linear"
    assert damage(BLOCKED, {2: math.inf}) == "not_finite"
    assert damage(BLOCKED, {5: 0.5}) == "not_integer"
    assert damage(BLOCKED, {5: 2.0**53}) == "not_integer"
    assert damage(BLOCKED, {14: 1}) == "checksum"
    assert damage(BLOCKED, {6: 1}) == "count"
    flags = {7: "nonfinite", 8: "overflow", 9: "inexact", 11: "over_capacity"}
    assert {position: damage(BLOCKED, {position: 1}) for position in flags} == flags
    assert damage(BLOCKED, {24: 3**16}) == "count"  # digit 277 of 277


def test_damage_to_a_table_is_named() -> None:
    """One cell breaks parity; the same in three cells leaves something that no key explains."""
    g = reference.geometry(BLOCKED)
    assert damage(BLOCKED, {place(BLOCKED, 5, 1): 1}) == "parity"
    assert damage(BLOCKED, {place(BLOCKED, 5, 1): 0.3}) == "not_integer"
    assert damage(BLOCKED, {place(BLOCKED, 5, 1): math.nan}) == "not_finite"
    assert damage(BLOCKED, {place(BLOCKED, 5, 0): 1}) == "unpeeled"
    assert damage(BLOCKED, {place(BLOCKED, role * g.segment_cells + 5, 1): 1 for role in range(3)}) == "unpeeled"
    beyond = {place(BLOCKED, cell, 3): 1 for cell in reference.cells_of_key(g, 2)[1]}
    assert damage(BLOCKED, beyond) == "count"


def test_damage_to_a_bitmap_is_named() -> None:
    """Digits that don't add up, of keys that don't exist, above the number of ranks, or of other keys."""
    plan = BLOCKED._replace(index="bitmap")
    g = reference.geometry(plan)
    assert g.bitmap_cells == 1 and g.keys == 3  # with the digits 1, 0, 2 in base 3
    assert damage(plan, {g.header_size: 1}) == "count"
    assert damage(plan, {g.header_size: 3}) == "count"
    assert damage(plan, {g.header_size: 3**3}) == "count"
    assert damage(plan, {g.header_size: -20}) == "count"
    assert damage(plan, {g.header_size: 3.0**g.digits_per_cell}) == "count"
    assert damage(plan, {g.header_size: -1}) == "count"
    assert damage(plan, {g.header_size: 2}) == "unpeeled"


def test_no_key_was_inserted_by_more_ranks_than_took_part() -> None:
    """One of two ranks took part, and everything behind the pilots says that two did."""
    for index, reason in (("keyed", "unpeeled"), ("bitmap", "count")):
        plan = BLOCKED._replace(index=index)
        g = reference.geometry(plan)
        wire = reference.encode(plan, sparse(8, {0: 1}), 1)
        assert reference.decode(plan, wire)[0] == 1
        wire[g.header_size :] *= 2
        wire[6] += 1
        wire[14] += 13
        assert refusal(plan, wire) == reason


def test_pilots_of_distinct_ranks_agree_in_parity() -> None:
    """A sum of numbers is odd where the sum of their squares is."""
    plan = BarePlan(10, world_size=4)
    wire = reference.encode(plan, sparse(10, {}), 0) + reference.encode(plan, sparse(10, {}), 1)
    reference.decode(plan, wire)
    unit = reference.geometry(plan).pilot_unit
    wire[1] += unit
    assert refusal(plan, wire) == "not_linear"


def test_what_ranks_declare_is_refused() -> None:
    """NaN, infinity, too large, too fine, too many, and a probe."""
    plan = BarePlan(40, capacity=4)
    reasons = {math.nan: "nonfinite", -math.inf: "nonfinite", 16: "overflow", 2.0**-60: "inexact"}
    for value, reason in reasons.items():
        assert refusal(plan, total_of(plan, [sparse(40, {3: value}), sparse(40, {})])) == reason
    many = total_of(plan, [sparse(40, dict.fromkeys(range(5), 1.0)), sparse(40, {})])
    assert refusal(plan, many) == "over_capacity"
    probe = plan._replace(index="none")
    assert refusal(probe, total_of(probe, [sparse(40, {}), sparse(40, {})])) == "header_only"


def test_what_is_no_wire_or_no_gradient_of_the_plan() -> None:
    """Sizes, types, ranks, formats and other plans."""
    plan = BarePlan(40)
    wire = total_of(plan, [sparse(40, {}), sparse(40, {})])
    for bad in (wire[:-1], wire.astype(np.float32), wire.reshape(1, -1)):
        with pytest.raises(WireError, match="float64 of shape"):
            reference.decode(plan, bad)
    with pytest.raises(WireError, match="another plan"):
        reference.decode(plan._replace(seed=1), wire)
    with pytest.raises(ConfigError, match="float64"):
        reference.decode(plan, wire, "float64")
    for x in (np.zeros(39, np.float32), np.zeros(40)):
        with pytest.raises(ConfigError, match="float32 of shape"):
            reference.encode(plan, x, 0)
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match="world_size"):
            reference.encode(plan, sparse(40, {}), rank)
