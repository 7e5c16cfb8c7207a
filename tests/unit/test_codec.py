"""The codec as a user sees it: exact, order-independent, verified or refused. The reference is the oracle."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Array, cases, unhurried

from hvd_lhc import Codec, ConfigError, DecodeError, LHCError, Plan, WireError, _kernel, reference


def decode_or_reason(codec: Codec, wire: Array) -> Array | str:
    """The decoded array, or why there is none. Hashing may fail, rarely; a wrong array may never come out."""
    try:
        return codec.decode(wire)
    except DecodeError as error:
        return error.reason


@unhurried
@given(cases())
def test_sum_and_average_are_the_exact_result_rounded_once(case: tuple[Plan, list[Array]]) -> None:
    """Sum and Average equal exact rational arithmetic, bit for bit, for all values and supports."""
    plan, gradients = case
    codec = Codec(plan)
    total = np.sum([codec.encode(x, rank=r) for r, x in enumerate(gradients)], axis=0)
    for wire, divisor in ((total, 1), (total * (1 / plan.world_size), plan.world_size)):
        decoded = decode_or_reason(codec, wire)
        if isinstance(decoded, str):
            assert decoded == "unpeeled" or decoded == "inexact"
            continue
        expected = reference.exact_sum(gradients, divisor=divisor)
        np.testing.assert_array_equal(decoded.view(np.uint32), np.asarray(expected, np.float32).view(np.uint32))


@unhurried
@given(cases(), st.randoms(use_true_random=False))
def test_addition_in_any_order_gives_the_same_bits(case: tuple[Plan, list[Array]], random: Any) -> None:
    """A ring, a tree or a switch may add in any order and grouping."""
    plan, gradients = case
    codec = Codec(plan)
    wires = [codec.encode(x, rank=r) for r, x in enumerate(gradients)]
    straight = np.sum(wires, axis=0)
    while len(wires) > 1:
        a = wires.pop(random.randrange(len(wires)))
        b = wires.pop(random.randrange(len(wires)))
        wires.append(a + b)
    np.testing.assert_array_equal(wires[0], straight)


@unhurried
@given(cases())
def test_decoding_in_place_gives_the_same_bits(case: tuple[Plan, list[Array]]) -> None:
    """Into zeros, and over a rank's own gradient unless that has elements that are -0; refused, it stays as it was."""
    plan, gradients = case
    codec = Codec(plan)
    encoded = [codec.encode_with_facts(x, rank=r) for r, x in enumerate(gradients)]
    total = np.sum([one.wire for one in encoded], axis=0)
    right = decode_or_reason(codec, total)
    for x, one in zip(gradients, encoded, strict=True):
        assert one.negative_zeros == bool((np.signbit(x) & (x == 0)).any())
        for out in (np.zeros_like(x), x.copy()):
            before = out.copy()
            if isinstance(right, str):
                with pytest.raises(DecodeError):
                    codec.decode(total, out=out)
                np.testing.assert_array_equal(out.view(np.uint32), before.view(np.uint32))
            elif not one.negative_zeros or not before.view(np.uint32).any():
                assert codec.decode(total, out=out) is out
                np.testing.assert_array_equal(out.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("out", [np.zeros(99, np.float32), np.zeros(100), np.zeros(200, np.float32)[::2]])
def test_an_output_that_does_not_fit_is_refused(out: Array) -> None:
    """Another size, another type, not contiguous."""
    codec = Codec(Plan(numel=100, world_size=2, capacity=8, exponent=4))
    with pytest.raises(ConfigError, match="out must be"):
        codec.decode(codec.encode(np.zeros(100, np.float32)) * 2, out=out)


@unhurried
@given(cases())
def test_every_instruction_set_gives_the_same_bits(case: tuple[Plan, list[Array]]) -> None:
    """Of wires, and of what they decode to."""
    plan, gradients = case
    codec = Codec(plan)
    seen = []
    before = _kernel.isa()
    try:
        for name in ("portable", "avx2", "avx512"):
            try:
                _kernel.use_isa(name)
            except ConfigError:
                assert name != "portable"
                continue
            wires = [codec.encode(x, rank=r) for r, x in enumerate(gradients)]
            decoded = decode_or_reason(codec, np.sum(wires, axis=0))
            seen.append(([wire.tobytes() for wire in wires], decoded if isinstance(decoded, str) else decoded.tobytes()))
    finally:
        _kernel.use_isa(before)
    assert all(one == seen[0] for one in seen)


def test_an_instruction_set_may_be_forced() -> None:
    """HVD_LHC_ISA names it; a wrong name is an error that tells the right ones."""
    program = "from hvd_lhc import _kernel; print(_kernel.isa())"
    for name, expected in (("portable", "portable\n"), ("abacus", "")):
        environment = {**os.environ, "HVD_LHC_ISA": name}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
        assert done.stdout == expected
        assert expected or ("ConfigError" in done.stderr and "avx512" in done.stderr)


@unhurried
@given(cases(), st.data())
def test_a_damaged_cell_is_never_believed(case: tuple[Plan, list[Array]], data: st.DataObject) -> None:
    """Whatever number of a reduced wire changes, decode refuses or returns what it would have returned."""
    plan, gradients = case
    codec = Codec(plan)
    total = np.sum([codec.encode(x, rank=r) for r, x in enumerate(gradients)], axis=0)
    right = decode_or_reason(codec, total)
    position = data.draw(st.integers(0, plan.wire_size - 1))
    total[position] = data.draw(
        st.sampled_from([total[position] + 1, total[position] - 1, total[position] + 0.5, np.nan, np.inf, -(2.0**60)])
        | st.floats(width=64)
    )
    try:
        decoded = codec.decode(total)
    except LHCError:
        return
    assert not isinstance(right, str)
    np.testing.assert_array_equal(decoded, right)


@given(st.integers(0, 2**32), st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_bounded_errors_stay_below_half_a_unit(seed: int, ranks: int) -> None:
    """In bounded plans each rank's element is off by at most half of two to the unit exponent, and is counted."""
    rng = np.random.default_rng(seed)
    plan = Plan(numel=500, world_size=ranks, capacity=500, exponent=40, precision="bounded", index="bitmap")
    gradients = [rng.standard_normal(500).astype(np.float32) for _ in range(ranks)]
    codec = Codec(plan)
    decoded = codec.decode_with_facts(np.sum([codec.encode(x, rank=r) for r, x in enumerate(gradients)], axis=0))
    assert decoded.header.inexact > 0
    bound = Fraction(2) ** (plan.unit_exponent - 1) * ranks
    for i in range(500):
        exact = sum(Fraction(float(x[i])) for x in gradients)
        assert abs(Fraction(float(decoded.values[i])) - exact) <= bound + abs(exact) / 2**24


@pytest.mark.parametrize("scale", [1 / 3, 0.1, 7.0, 1e-12, 2.0**-40])
def test_any_common_factor_is_undone(scale: float) -> None:
    """Predivide factors scale the ranks' wires before the sum, others the sum: the gradient is scaled, rounded once."""
    rng = np.random.default_rng(5)
    plan = Plan(numel=2000, world_size=3, capacity=200, exponent=6, parts=2)
    gradients = []
    for _ in range(3):
        x = np.zeros(2000, np.float32)
        x[rng.choice(2000, 60, replace=False)] = rng.standard_normal(60)
        gradients.append(x)
    codec = Codec(plan)
    wires = [codec.encode(x, rank=r) for r, x in enumerate(gradients)]
    for total in (np.sum([w * scale for w in wires], axis=0), np.sum(wires, axis=0) * scale):
        decoded = codec.decode_with_facts(total)
        factor = Fraction(decoded.header.factor)
        assert decoded.header.factor == pytest.approx(scale, rel=1e-15)
        for i in np.flatnonzero(decoded.values):
            exact = sum(Fraction(float(x[i])) for x in gradients) * factor
            assert float(decoded.values[i]) == reference.round_once(exact, "float32")


@pytest.mark.parametrize("index", ["none", "keyed"])
@pytest.mark.parametrize(("world_size", "scale"), [(48, 0.1), (64, 0.1), (125, 1 / 7), (4096, 0.1)])
def test_a_predivide_factor_is_undone_with_many_ranks(world_size: int, scale: float, index: str) -> None:
    """Every rank rounds its scaled wire, and every addition rounds again; what ranks honestly sent is still read."""
    plan = Plan(numel=10, world_size=world_size, exponent=2, index=index)
    codec = Codec(plan)
    x = np.zeros(10, np.float32)
    x[3] = 1.5
    total = np.zeros(plan.wire_size)
    for rank in range(world_size):
        total += codec.encode(x, rank=rank) * scale
    header = codec.read_header(total)
    assert (header.participants, header.nonzero_elements) == (world_size, world_size)
    assert header.factor == pytest.approx(scale, rel=1e-12)
    if index == "keyed":
        assert codec.decode(total)[3] == reference.round_once(Fraction(1.5) * world_size * Fraction(header.factor), "float32")


@pytest.mark.parametrize("world_size", [7, 8, 11, 12])
def test_some_ranks_are_never_taken_for_all(world_size: int) -> None:
    """There are sets of ranks with the mean and the mean square of all ranks; they are counted right, too."""
    codec = Codec(Plan(numel=10, world_size=world_size, index="none"))
    wires = [codec.encode(np.zeros(10, np.float32), rank=rank) for rank in range(world_size)]
    means = (world_size + 1) / 2, (world_size + 1) * (2 * world_size + 1) / 6
    found = 0
    for count in range(1, world_size):
        for ranks in itertools.combinations(range(world_size), count):
            if (np.mean([r + 1 for r in ranks]), np.mean([(r + 1) ** 2 for r in ranks])) == pytest.approx(means):
                header = codec.read_header(np.sum([wires[r] for r in ranks], axis=0))
                assert (header.participants, header.scale, header.factor) == (count, "sum", 1)
                found += 1
    assert found


def test_ranks_that_joined_out_are_seen() -> None:
    """Ranks that send zeros leave the right sum, and are counted; with Average the divisor stays the world size."""
    plan = Plan(numel=100, world_size=4, capacity=50, exponent=8)
    codec = Codec(plan)
    x = np.zeros(100, np.float32)
    x[3] = 12
    total = codec.encode(x, rank=1) + codec.encode(x, rank=3)
    decoded = codec.decode_with_facts(total)
    assert (decoded.header.participants, decoded.header.scale, decoded.values[3]) == (2, "sum", 24)
    decoded = codec.decode_with_facts(total / 4)
    assert (decoded.header.participants, decoded.header.scale, decoded.values[3]) == (2, "average", 6)


@pytest.mark.parametrize("reduce", [np.minimum, np.maximum, np.multiply, lambda a, b: 0.3 * a + 0.6 * b])
def test_other_reductions_are_refused(reduce: Any) -> None:
    """Min, Max, Product and Adasum's weighted sums are told apart from sums."""
    plan = Plan(numel=100, world_size=2, capacity=50, exponent=8)
    codec = Codec(plan)
    x = np.zeros(100, np.float32)
    x[3] = 12
    with pytest.raises(DecodeError) as caught:
        codec.decode(reduce(codec.encode(x, rank=0), codec.encode(-x, rank=1)))
    assert caught.value.reason in ("not_linear", "not_integer")


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        ({"at": 5, "value": np.nan}, "nonfinite"),
        ({"at": 5, "value": np.inf}, "nonfinite"),
        ({"at": 5, "value": 16.0}, "overflow"),
        ({"at": 5, "value": 2.0**-60}, "inexact"),
        ({"at": slice(0, 60), "value": 1.0}, "over_capacity"),
    ],
)
def test_what_does_not_fit_is_declared_and_refused(plant: dict[str, Any], reason: str) -> None:
    """One rank's misfit refuses the sum, with a reason and a header that all ranks can read."""
    plan = Plan(numel=1000, world_size=2, capacity=50, exponent=4)
    codec = Codec(plan)
    x = np.zeros(1000, np.float32)
    y = x.copy()
    y[plant["at"]] = plant["value"]
    with pytest.raises(DecodeError) as caught:
        codec.decode(codec.encode(x, rank=0) + codec.encode(y, rank=1))
    assert caught.value.reason == reason and caught.value.header is not None
    assert codec.read_header(codec.encode(x, rank=0) + codec.encode(y, rank=1)) == caught.value.header


def test_more_keys_than_capacity_over_all_ranks_can_not_be_peeled() -> None:
    """Each rank fits, the union is several times too large: refused as unpeeled, never a wrong sum."""
    plan = Plan(numel=100_000, world_size=8, capacity=1000, exponent=4)
    codec = Codec(plan)
    total = np.zeros(plan.wire_size)
    for rank in range(8):
        x = np.zeros(100_000, np.float32)
        x[rank * 1000 : rank * 1000 + 1000] = 1
        total += codec.encode(x, rank=rank)
    with pytest.raises(DecodeError) as caught:
        codec.decode(total)
    assert caught.value.reason == "unpeeled"


def test_what_is_not_this_plans_wire() -> None:
    """Size, dtype, shape, another plan, an empty array: WireError that says what was expected."""
    plan = Plan(numel=100, world_size=2, capacity=50)
    codec = Codec(plan)
    wire = codec.encode(np.zeros(100, np.float32)) * 2
    for bad in (wire[:-1], wire.astype(np.float32), wire.reshape(1, -1), np.empty(0), np.zeros(plan.wire_size, np.int64)):
        with pytest.raises(WireError, match="float64 array of shape"):
            codec.decode(bad)
    other = Codec(Plan(numel=100, world_size=2, capacity=50, seed=1))
    with pytest.raises(WireError, match="another plan"):
        other.decode(wire)
    with pytest.raises(DecodeError):
        codec.decode(np.zeros(plan.wire_size))
    with pytest.raises(ConfigError, match="float32 array of shape"):
        codec.encode(np.zeros(100))
    with pytest.raises(ConfigError, match="rank 2"):
        codec.encode(np.zeros(100, np.float32), rank=2)
    with pytest.raises(ConfigError, match="rank '0'"):
        codec.encode(np.zeros(100, np.float32), rank="0")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Codec\(Plan\("):
        Codec(100)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype must be one of"):
        codec.decode(wire, dtype="float64")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"numel": 0}, "numel"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 4097}, "world_size"),
        ({"capacity": 0}, "capacity"),
        ({"index": "hash"}, "index"),
        ({"block": 0}, "block"),
        ({"block": 101}, "block"),
        ({"parts": 3}, "parts"),
        ({"exponent": 129}, "exponent"),
        ({"exponent": -149}, "exponent"),
        ({"precision": "exact"}, "precision"),
        ({"numel": 1.5}, "numel"),
        ({"numel": -1}, "out of range"),
        ({"probe_block": 101}, "probe_block"),
        ({"numel": 2**45, "world_size": 4096}, "lower world_size"),
        ({"numel": 2**30, "capacity": 10, "world_size": 4096}, "raise capacity or block"),
    ],
)
def test_impossible_plans_say_which_number_to_change(fields: dict[str, Any], says: str) -> None:
    """Every impossible plan is a ConfigError with the field's name in it."""
    with pytest.raises(ConfigError, match=says):
        Plan(**{"numel": 100, "world_size": 2, **fields})


def test_a_plan_beyond_2_to_32_elements_has_a_layout() -> None:
    """Sizes are 64-bit throughout: the wire of 2**33 elements is as long as capacity says."""
    plan = Plan(numel=2**33 + 5, world_size=4, capacity=100_000)
    assert plan.wire_size == reference.wire_size(plan) < 1_000_000
    assert plan.key_count == 2**33 + 5


def test_plans_are_frozen_equal_and_picklable() -> None:
    """A Plan is a value."""
    plan = Plan(numel=100, world_size=2, capacity=50)
    assert pickle.loads(pickle.dumps(plan)) == plan and hash(plan) == hash(Plan(numel=100, world_size=2, capacity=50))
    assert pickle.loads(pickle.dumps(plan)).wire_size == plan.wire_size
    with pytest.raises(AttributeError):
        plan.numel = 5  # type: ignore[misc]


def test_zero_gradients_give_zeros() -> None:
    """An empty table decodes to zeros; minus zero comes out as plus zero."""
    plan = Plan(numel=100, world_size=2, capacity=50)
    codec = Codec(plan)
    x = np.full(100, -0.0, np.float32)
    decoded = codec.decode(codec.encode(x, rank=0) + codec.encode(x, rank=1))
    assert not decoded.view(np.uint32).any()


def test_encode_does_not_touch_its_input_and_reuses_out() -> None:
    """The gradient stays as it is; ``out`` is overwritten whatever it held."""
    plan = Plan(numel=100, world_size=2, capacity=50)
    codec = Codec(plan)
    x = np.zeros(100, np.float32)
    x[5] = 0.5
    x.flags.writeable = False
    out = np.full(plan.wire_size, np.nan)
    assert codec.encode(x, rank=0, out=out) is out
    np.testing.assert_array_equal(out, codec.encode(x, rank=0))
