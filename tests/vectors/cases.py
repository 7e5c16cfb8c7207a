"""What the golden wires are made of: plans, gradients, and what a reduction did to them. ``make.py`` writes them down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
#: A rank's number (None: it isn't told) and the nonzero elements of its gradient, by index.
Gradient = tuple["int | None", "dict[int, float]"]
Reduction = Callable[["list[Array]"], Array]


class VectorPlan(NamedTuple):
    """The fields of a plan, as in docs/wire-format.md, section 1."""

    numel: int
    world_size: int = 2
    capacity: int = 16
    index: str = "keyed"
    block: int = 1
    parts: int = 1
    exponent: int = 4
    precision: str = "lossless"
    seed: int = 0
    probe_block: int = 1


@dataclass(frozen=True)
class Case:
    """One golden wire.

    Attributes:
        name: of the case.
        comment: how it was made and what it shows.
        plan: shared by all ranks.
        gradients: those of the ranks that take part.
        reduce: makes the reduced wire of the ranks' wires.
        dtype: what the result is rounded to.
    """

    name: str
    comment: str
    plan: VectorPlan
    gradients: list[Gradient]
    reduce: Reduction
    dtype: str = "float32"


def total(wires: list[Array]) -> Array:
    """op=Sum."""
    return np.sum(wires, axis=0)


def average(world_size: int) -> Reduction:
    """op=Average: Horovod multiplies the sum by 1 / N in binary64."""
    return lambda wires: total(wires) * (1.0 / world_size)


def prescaled(factor: float) -> Reduction:
    """Every rank's wire is scaled before the sum."""
    return lambda wires: total([wire * factor for wire in wires])


def damaged(position: int, difference: float) -> Reduction:
    """A sum of which one number was changed on the way."""

    def reduce(wires: list[Array]) -> Array:
        wire = total(wires)
        wire[position] += difference
        return wire

    return reduce


def many(count: int, start: int = 0, step: int = 1) -> dict[int, float]:
    """Small numbers, each another one, at regular places."""
    return {start + step * i: (-1) ** i * (1 + i / 8) for i in range(count)}


TINY = 2.0**-149
TWO = [(0, {3: 1.5, 42: -0.1, 99: 3.0}), (1, {3: 0.25, 7: 1 / 3, 99: -3.0})]
ROWS = [(0, {0: 1.0, 4: 2.0, 21: -1.5}), (1, {5: 0.5, 22: 0.75}), (2, {1: -1.0})]
LARGE = VectorPlan(numel=100_000, world_size=4, exponent=1, seed=2**64 - 1)

CASES = [
    Case("keyed", "Two ranks share two of four keys; one sum is zero.", VectorPlan(100), TWO, total),
    Case("bitmap", "The same with a bitmap, whose last cell is short.", VectorPlan(100, index="bitmap"), TWO, total),
    Case(
        "two_index_lanes",
        "An id of 11 bits: the index of a cell takes two lanes; the largest seed.",
        LARGE,
        [(rank, many(4, 99_000 - 7 * rank, 11)) for rank in range(4)],
        total,
    ),
    Case("rows", "Blocks of five, the last one short.", VectorPlan(23, 3, block=5, probe_block=2), ROWS, total),
    Case(
        "rows_bitmap", "The same with a bitmap.", VectorPlan(23, 3, index="bitmap", block=5, probe_block=2), ROWS, total
    ),
    Case(
        "two_parts",
        "Elements whose sizes are 2^60 apart, exact in two parts; one sum needs 77 bits and is rounded once.",
        VectorPlan(100, parts=2, exponent=2),
        [(0, {5: 1 + 2.0**-23, 6: 2.0**-58, 7: 2.0**-75}), (1, {5: 2.0**-24, 6: -(2.0**-60), 7: -1.0})],
        total,
    ),
    Case(
        "two_parts_rows",
        "Blocks of three, of which two need a low part, in the second for one element alone.",
        VectorPlan(23, 3, block=3, parts=2, exponent=1),
        [(0, {0: 1.0, 1: 2.0**-43, 2: 2.0**-44}), (1, {0: 0.5, 1: -(2.0**-43), 21: 0.25}), (2, {21: 2.0**-24, 22: 2.0**-60})],
        average(3),
    ),
    Case(
        "two_parts_bitmap",
        "The same with a bitmap.",
        VectorPlan(23, 3, index="bitmap", block=3, parts=2, exponent=1),
        [(0, {0: 1.0, 1: 2.0**-43, 2: 2.0**-44}), (1, {0: 0.5, 1: -(2.0**-43), 21: 0.25}), (2, {21: 2.0**-24, 22: 2.0**-60})],
        average(3),
    ),
    Case("one_rank", "A world of one.", VectorPlan(100, 1), [TWO[0]], total),
    Case("average_of_two", "op=Average halves the sum.", VectorPlan(100), TWO, average(2)),
    Case(
        "average_of_three",
        "A third of each sum, rounded to the nearest float32, once.",
        VectorPlan(100, 3),
        [*TWO, (2, {3: 1.0, 50: 1.0})],
        average(3),
    ),
    Case(
        "prescaled",
        "Every rank's wire was multiplied by 0.3 before the sum: the pilots tell the factor.",
        VectorPlan(100, 3),
        [*TWO, (2, {3: 1.0, 50: 1.0})],
        prescaled(0.3),
    ),
    Case("joined", "Ranks 1 and 3 of four: the others have joined.", VectorPlan(100, 4), [(1, TWO[0][1]), (3, TWO[1][1])], total),
    Case(
        "joined_average",
        "The same with op=Average: the divisor is the world size.",
        VectorPlan(100, 4, index="bitmap"),
        [(1, TWO[0][1]), (3, TWO[1][1])],
        average(4),
    ),
    Case(
        "mean_of_all",
        "Ranks 1 and 5 of seven have the mean and the mean square of all seven, but rank 0 is missing.",
        VectorPlan(100, 7),
        [(1, {0: 1 + 2.0**-23}), (5, {0: 2.0**-24})],
        total,
    ),
    Case("unnamed", "Encoders that are not told their rank.", VectorPlan(100), [(None, x) for _, x in TWO], total),
    Case(
        "bounded",
        "Elements below the unit of 2^-40 are rounded to it, ties to even, and counted.",
        VectorPlan(100, precision="bounded"),
        [(0, {1: 1.5 * 2.0**-40, 2: 0.5 * 2.0**-40, 3: 8.0}), (1, {1: -2.5 * 2.0**-40, 9: 0.75 * 2.0**-40})],
        total,
    ),
    Case(
        "subnormal",
        "The smallest float32, and the largest subnormal one.",
        VectorPlan(100, exponent=-120),
        [(0, {1: TINY, 2: (2**23 - 1) * TINY, 3: -5 * TINY}), (1, {1: TINY, 2: TINY, 3: TINY})],
        average(2),
    ),
    Case(
        "largest",
        "A sum beyond float32 is infinite; one just below the limit is not.",
        VectorPlan(100, exponent=128, parts=2),
        [(0, {1: 2.0**127, 2: (2**24 - 1) * 2.0**104}), (1, {1: 2.0**127, 2: -(2.0**80)})],
        total,
    ),
    Case(
        "float16",
        "Ties to even, subnormal numbers and overflow of float16.",
        VectorPlan(100, exponent=16),
        [(0, {1: 2048.0, 2: 2050.0, 3: 65504.0, 4: 2.0**-24}), (1, {1: 1.0, 2: 1.0, 3: 16.0, 4: -(2.0**-23)})],
        total,
        "float16",
    ),
    Case(
        "bfloat16",
        "Ties to even of bfloat16.",
        VectorPlan(100, exponent=10),
        [(0, {1: 256.0, 2: 258.0, 3: 0.1015625}), (1, {1: 1.0, 2: 1.0, 3: 2.0**-12})],
        total,
        "bfloat16",
    ),
    Case(
        "many_ranks",
        "Three of 4096 ranks, whose hashes have 26 bits.",
        VectorPlan(60, 4096, index="bitmap", block=7, exponent=2, parts=2),
        [(0, {1: 1.0}), (2047, {8: 1.5}), (4095, {1: -0.5, 59: 0.125})],
        total,
    ),
    Case("header_only", "A probe: no table.", VectorPlan(100, index="none", probe_block=10), TWO, total),
    Case("nonfinite", "NaN and infinity are declared.", VectorPlan(100), [(0, {1: float("nan")}), (1, {1: float("inf")})], total),
    Case("overflow", "16 is not below 2^4.", VectorPlan(100), [(0, {1: 16.0}), (1, {2: 1.0})], total),
    Case("inexact", "One element is no multiple of the unit.", VectorPlan(100), [(0, {1: 2.0**-41}), (1, {2: 8.0})], total),
    Case("over_capacity", "Rank 1 has 17 keys.", VectorPlan(100), [(0, {}), (1, many(17))], total),
    Case(
        "unpeeled",
        "Eight ranks of 16 keys each, all different: more keys than cells.",
        VectorPlan(1000, 8, exponent=8),
        [(rank, many(16, 100 * rank)) for rank in range(8)],
        total,
    ),
    Case("damaged_checksum", "One nonzero element more than there is.", VectorPlan(100), TWO, damaged(5, 1)),
    Case("damaged_flag", "A flag without its share of the checksum.", VectorPlan(100), TWO, damaged(7, 1)),
    Case("damaged_fingerprint", "Another plan.", VectorPlan(100), TWO, damaged(4, 1)),
    Case("damaged_value", "One more unit in a value of cell 3.", VectorPlan(100), TWO, damaged(25 + 2 * 3 + 1, 1)),
    Case("damaged_index", "One more unit in the index of cell 3.", VectorPlan(100), TWO, damaged(25 + 2 * 3, 1)),
    Case("not_an_integer", "A third of a unit in cell 3.", VectorPlan(100), TWO, damaged(25 + 2 * 3 + 1, 1 / 3)),
    Case("not_a_number", "NaN in cell 3.", VectorPlan(100), TWO, damaged(25 + 2 * 3 + 1, float("nan"))),
    Case("minimum", "op=Min is no sum.", VectorPlan(100), TWO, lambda wires: np.min(wires, axis=0)),
    Case("product", "op=Product is no sum.", VectorPlan(100), TWO, lambda wires: np.prod(wires, axis=0)),
]
