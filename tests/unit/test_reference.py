"""The reference's plans, places and wires against arithmetic that shares no code with it.

The reference is the kernel's oracle; this is its own. How it decodes is in ``test_reference_sums.py``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import BarePlan, plan_fields, sparse, total_of, unhurried

from hvd_lhc import ConfigError, reference


def geometry_or_skip(fields: dict[str, Any]) -> tuple[BarePlan, reference.Geometry]:
    """A drawn plan with its geometry; another draw if the plan is impossible."""
    plan = BarePlan(**fields)
    try:
        return plan, reference.geometry(plan)
    except ConfigError:
        assume(False)
        raise


# Section 1: plans


def test_a_geometry_worked_out_by_hand() -> None:
    """1000 elements, 4 ranks, 100 keys: every number of section 1, from pencil and paper."""
    g = reference.geometry(BarePlan(1000, world_size=4, capacity=100))
    assert (g.keys, g.count_bits, g.cell_bits, g.value_bits) == (1000, 2, 49, 43)
    assert (g.unit_exponent, g.pilot_unit, g.digits_per_cell, g.magnitude_cells) == (4 - 43, 6 * 2**41, 20, 14)
    assert (g.key_bits, g.segment_bits, g.start_segments, g.cells) == (10, 7, 3, 5 * 128)
    assert (g.ids, g.count_field_bits, g.r_bits, g.index_lanes) == (3, 6, 4, 1)
    assert (g.header_size, g.cell_size, g.wire_size) == (29, 2, 29 + 2 * 5 * 128)


@pytest.mark.parametrize(
    ("world_size", "cell_bits"), [(1, 49), (81, 49), (82, 48), (167, 48), (168, 47), (1361, 45), (2727, 44), (4096, 43)]
)
def test_cells_leave_room_for_the_rounding_of_many_ranks(world_size: int, cell_bits: int) -> None:
    """T by hand; and the bound of section 9 that it was made for."""
    g = reference.geometry(BarePlan(10, world_size))
    assert g.cell_bits == cell_bits
    error = (Fraction(3, 2) * world_size + 5) / 2**53  # of the sum of a cell's magnitudes
    assert error * 2 ** (cell_bits - 4) < Fraction(3, 4)  # a key that is alone in its cells
    assert error * 2**g.full_bits < Fraction(1, 4)
    assert world_size * 2**g.hash_bits <= 2**g.full_bits < 2**g.cell_bits


@unhurried
@given(plan_fields())
def test_geometries_have_room_for_what_they_hold(fields: dict[str, Any]) -> None:
    """Cells, ids, digits, pilots and index fields are as large as the largest number that is put into them."""
    plan, g = geometry_or_skip(fields)
    n, cell_limit = plan.world_size, 2**g.cell_bits
    assert g.segment_cells == 2**g.segment_bits
    assert g.cells == (0 if plan.index == "none" else (g.start_segments + 2) * g.segment_cells)
    assert plan.numel <= g.blocks * plan.block < plan.numel + plan.block and g.keys == plan.parts * g.blocks
    assert 2**g.key_bits >= g.keys and (g.key_bits == 0 or 2 ** (g.key_bits - 1) < g.keys)
    assert g.ids * g.start_segments * g.segment_cells >= 2**g.key_bits
    assert g.ids <= g.segment_cells**2
    assert (n + 1) ** g.digits_per_cell <= 2**g.full_bits < (n + 1) ** (g.digits_per_cell + 1)
    assert g.digits_per_cell * g.magnitude_cells >= 277
    assert sum((rank + 1) ** 2 * g.pilot_unit for rank in range(n)) < cell_limit > n * g.pilot_unit
    assert n * 16 * 2**g.value_bits <= cell_limit
    if plan.index == "keyed":
        r = 3 * g.ids - 1
        assert r < 2**g.r_bits and 16 * n <= 2**g.count_field_bits
        packed = 16 * n * (2**g.count_field_bits * r), 16 * n * r**2
        if g.index_lanes == 1:
            assert 16 * n * r < 2 ** (g.count_field_bits + g.r_bits)
            assert packed[1] * 2 ** (2 * g.count_field_bits + g.r_bits) < cell_limit
        else:
            assert max(packed) < cell_limit
    assert g.wire_size == g.header_size + g.bitmap_cells + g.cells * g.cell_size == reference.wire_size(plan)


@pytest.mark.parametrize(
    "fields",
    [
        {"numel": 0},
        {"numel": 2**48 + 1},
        {"world_size": 0},
        {"world_size": 4097},
        {"capacity": 0},
        {"capacity": 2**31},
        {"block": 0},
        {"block": 101},
        {"parts": 3},
        {"exponent": -149},
        {"exponent": 129},
        {"seed": -1},
        {"seed": 2**64},
        {"probe_block": 0},
        {"index": "hash"},
        {"precision": "exact"},
    ],
)
def test_fields_out_of_range_are_named(fields: dict[str, Any]) -> None:
    """One step beyond each end of each range of section 1."""
    with pytest.raises(ConfigError, match=next(iter(fields))):
        reference.geometry(BarePlan(**{"numel": 100, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"numel": 1},
        {"numel": 2**48, "index": "bitmap", "world_size": 1},
        {"world_size": 1},
        {"world_size": 4096},
        {"capacity": 1},
        {"capacity": 2**31 - 1},
        {"block": 100},
        {"exponent": -148},
        {"exponent": 128},
        {"seed": 2**64 - 1},
        {"probe_block": 100},
    ],
)
def test_the_ends_of_the_ranges_are_plans(fields: dict[str, Any]) -> None:
    """Both ends of each range of section 1 belong to it."""
    assert reference.wire_size(BarePlan(**{"numel": 100, **fields})) > 15


# Section 3: places


def test_mix_is_murmurs_finalizer() -> None:
    """A known pair, and the inverse of every step."""
    assert (reference.mix(0), reference.mix(1)) == (0, 0xB456BCFC34C2CB2C)
    for h in (1, 0xDEADBEEF, 2**64 - 1):
        back = reference.mix(h)
        for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
            back ^= back >> 33
            back = back * pow(factor, -1, 2**64) % 2**64
        assert back ^ (back >> 33) == h


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 31, 32, 33, 1000, 4096])
def test_every_key_has_its_own_place(numel: int, seed: int) -> None:
    """π is a bijection: with all of 2^κ keys, cell 0 and id together take every value once."""
    g = reference.geometry(BarePlan(numel, seed=seed))
    everything = reference.geometry(BarePlan(2**g.key_bits, seed=seed))
    places = set()
    for key in range(everything.keys):
        key_id, (cell, _, _) = reference.cells_of_key(everything, key)
        segment, offset = divmod(cell, everything.segment_cells)
        places.add((key_id * everything.start_segments + segment) * everything.segment_cells + offset)
    assert places == set(range(2**g.key_bits))
    assert [reference.cells_of_key(g, k) for k in range(g.keys)] == [
        reference.cells_of_key(everything, k) for k in range(g.keys)
    ]


@pytest.mark.parametrize("seed", [0, 5, 2**63])
def test_no_two_keys_share_three_cells(seed: int) -> None:
    """All L² ids of one segment: shifts are injective, and below L the first of them alone."""
    g = reference.geometry(BarePlan(2**15, capacity=8, seed=seed))
    assert g.start_segments == 1 and g.ids == g.segment_cells**2 == 1024
    triples, pairs = set(), set()
    few = 0
    for key in range(g.keys):
        key_id, cells = reference.cells_of_key(g, key)
        assert [cell // g.segment_cells for cell in cells] == [0, 1, 2]
        triples.add(cells)
        if key_id < g.segment_cells:
            few += 1
            pairs.add(cells[:2])
    assert len(triples) == g.keys and len(pairs) == few == g.segment_cells**2


@unhurried
@given(plan_fields(), st.data())
def test_a_cell_a_role_and_an_id_lead_back_to_the_key(fields: dict[str, Any], data: st.DataObject) -> None:
    """For every key of tables up to 2^48 elements; anything else leads to another key that does lie there, or to none."""
    _, g = geometry_or_skip(fields)
    key = data.draw(st.integers(0, g.keys - 1))
    key_id, cells = reference.cells_of_key(g, key)
    assert 0 <= key_id < g.ids and all(0 <= cell < (g.start_segments + 2) * g.segment_cells for cell in cells)
    for role, cell in enumerate(cells):
        assert reference.key_of_cell(g, cell, role, key_id) == key
    cell = data.draw(st.integers(0, (g.start_segments + 2) * g.segment_cells - 1))
    role, other_id = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2 * g.ids))
    other = reference.key_of_cell(g, cell, role, other_id)
    if other is not None:
        found_id, found = reference.cells_of_key(g, other)
        assert (found_id, found[role]) == (other_id, cell) and 0 <= other < g.keys


# Sections 4 and 5: what a rank writes


@unhurried
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from(["keyed", "bitmap", "none"]), st.integers(1, 4))
def test_headers_count(seed: int, ranks: int, index: str, block: int) -> None:
    """Each count of the reduced header, from NumPy, for gradients with everything in them."""
    rng = np.random.default_rng(seed)
    plan = BarePlan(50, world_size=ranks, index=index, block=block, capacity=20, exponent=3, probe_block=7, seed=seed)
    special = np.array([0, -0.0, np.nan, np.inf, -np.inf, 8, -8, 7.9999995, 2**-40, 2**-41, 1e-40, 1, -1 / 3], np.float32)
    gradients = [np.where(rng.random(50) < 0.7, rng.choice(special, 50), 0).astype(np.float32) for _ in range(ranks)]
    header = reference.read_header(plan, total_of(plan, gradients))
    unit = 2.0 ** (3 - reference.geometry(plan).value_bits)
    x = np.concatenate([np.pad(x, (0, -50 % block)) for x in gradients]).reshape(ranks, -1, block)
    present = (x != 0).any(axis=2)
    fitting = np.isfinite(x) & (np.abs(x) < 8)
    wide = np.where(fitting, x, 0).astype(np.float64) / unit
    probes = np.concatenate([np.pad(y, (0, 6)) for y in gradients]).reshape(ranks, 8, 7)
    assert (header.participants, header.scale, header.factor) == (ranks, "sum", 1)
    assert header.nonzero_elements == np.count_nonzero(x)
    assert header.nonzero_keys == present.sum()
    assert header.nonfinite == np.count_nonzero(~np.isfinite(x))
    assert header.overflow == np.count_nonzero(np.isfinite(x) & (np.abs(x) >= 8))
    assert header.inexact == header.inexact_single == np.count_nonzero(wide != np.rint(wide))
    assert header.over_capacity == np.count_nonzero(present.sum(axis=1) > 20)
    assert header.nonzero_probe_blocks == np.count_nonzero((probes != 0).any(axis=2))
    largest = np.abs(x[np.isfinite(x)]).max(initial=0)
    if largest == 0:
        assert header.magnitude_exponent is None
    else:
        assert header.magnitude_exponent is not None and largest < 2.0**header.magnitude_exponent <= 2 * largest


@unhurried
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2))
def test_tables_are_linear(seed: int, block: int, parts: int) -> None:
    """What three ranks write for a third of the keys each is what one writes for all, in any order of addition."""
    plan = BarePlan(40, world_size=3, capacity=40, block=block, parts=parts, exponent=12)
    g = reference.geometry(plan)
    x = np.random.default_rng(seed).integers(-1000, 1000, 40).astype(np.float32)
    thirds = [np.where(np.arange(40) // block % 3 == part, x, 0).astype(np.float32) for part in range(3)]
    a, b, c = (reference.encode(plan, third, rank) for rank, third in enumerate(thirds))
    for total in ((a + b) + c, a + (b + c), (c + a) + b):
        np.testing.assert_array_equal(total, a + b + c)
    together = reference.encode(plan, x, 0)
    np.testing.assert_array_equal((a + b + c)[g.header_size :], together[g.header_size :])


def test_a_value_stands_in_three_cells_and_an_id_in_their_index() -> None:
    """One element, looked for by hand: value in units, and C, R, Q of section 4."""
    plan = BarePlan(1000, world_size=4, capacity=100, seed=9)
    g = reference.geometry(plan)
    key_id, cells = reference.cells_of_key(g, 123)
    table = reference.encode(plan, sparse(1000, {123: -1.5}), 2)[g.header_size :].reshape(-1, 2)
    assert np.flatnonzero(table.any(axis=1)).tolist() == sorted(cells)
    for role, cell in enumerate(cells):
        r = 3 * key_id + role
        assert table[cell].tolist() == [1 + r * 2**6 + r**2 * 2**16, -1.5 * 2**39]


def test_no_more_than_capacity_keys_are_inserted() -> None:
    """The first of them; the header counts all."""
    plan = BarePlan(1000, capacity=4)
    g = reference.geometry(plan)
    many = reference.encode(plan, sparse(1000, dict.fromkeys(range(10, 20), 1.0)), 0)
    few = reference.encode(plan, sparse(1000, dict.fromkeys(range(10, 14), 1.0)), 0)
    np.testing.assert_array_equal(many[g.header_size :], few[g.header_size :])
    assert (many[6], many[11], few[6], few[11]) == (10, 1, 4, 0)


@pytest.mark.parametrize(
    ("parts", "value"), [(1, 3.0), (1, -(2.0**-39)), (2, 3.0), (2, 1 + 2.0**-23), (2, -(2.0**-39 + 2.0**-41)), (2, -(2.0**-82))]
)
def test_parts_hold_the_value(parts: int, value: float) -> None:
    """High part times 2^b plus low part is the value; the high one was cut towards zero, and a low one of zero is not sent."""
    plan = BarePlan(10, world_size=4, parts=parts)
    g = reference.geometry(plan)
    wire = reference.encode(plan, sparse(10, {7: value}), 0)
    exact = Fraction(value) / Fraction(2) ** (4 - parts * 43)
    high = math.trunc(exact / 2**43) if parts == 2 else exact
    low = exact - high * 2**43 if parts == 2 else 0
    assert wire[6] == (2 if low else 1) and wire[10] == (1 if low else 0)
    table: dict[int, Fraction] = {}
    for key, part in ((7, high), (17, low)):
        if part or key == 7:
            for cell in reference.cells_of_key(g, key)[1]:
                table[cell] = table.get(cell, Fraction(0)) + part
    numbers = wire[g.table_start :].reshape(g.cells, g.cell_size)[:, g.index_lanes :]
    assert {cell: Fraction(z) for cell, (z,) in enumerate(numbers.tolist()) if z} == {c: v for c, v in table.items() if v}
