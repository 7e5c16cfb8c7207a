"""Sections 4 and 5: what a rank writes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from hvd_lhc.errors import ConfigError
from hvd_lhc.reference.layout import CHECKSUM, HEADER_FIELDS, PILOTS, Geometry, PlanLike, geometry
from hvd_lhc.reference.mixing import GOLDEN, mix
from hvd_lhc.reference.placement import cells_of_key
from hvd_lhc.reference.rounding import smallest_exponent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["checksum", "contribution", "encode"]


def contribution(g: Geometry, key_id: int, role: int) -> list[int]:
    """What one insertion adds to the index lanes of a cell."""
    r, beta, rho = 3 * key_id + role, g.count_field_bits, g.r_bits
    if g.index_lanes == 0:
        return []
    if g.index_lanes == 1:
        return [1 + r * 2**beta + r**2 * 2 ** (2 * beta + rho)]
    return [1 + r * 2**beta, r**2]


def _keys(plan: PlanLike, g: Geometry, values: dict[int, int]) -> dict[int, list[int]]:
    """The values of every present key, in the order of insertion: each block's high part, and its low part if it has one."""
    unit = 2**g.low_bits
    keys: dict[int, list[int]] = {}
    for block in sorted({i // plan.block for i in values}):
        v = [values.get(block * plan.block + j, 0) for j in range(plan.block)]
        high = [v_j // unit if v_j >= 0 else -(-v_j // unit) for v_j in v]  # towards zero
        low = [v_j - h * unit for v_j, h in zip(v, high)]
        keys[block] = high
        if plan.parts == 2 and any(low):
            keys[g.blocks + block] = low
    return keys


def checksum(g: Geometry, header: Sequence[int]) -> int:
    """What position 14 of a header must be, modulo a power of two, from the positions that are neither pilots nor itself."""
    total = sum((2 * p + 1) * value for p, value in enumerate(header) if p >= PILOTS and p != CHECKSUM)
    return int(total % 2**g.checksum_bits)


def _pilots(plan: PlanLike, g: Geometry, rank: int | None) -> list[int]:
    n, unit = plan.world_size, g.pilot_unit
    if rank is None:
        return [unit, (n + 1) * (2 * n + 1) * unit // 6, -(n + 1) * unit // 2, unit]
    return [unit, (rank + 1) ** 2 * unit, -(rank + 1) * unit, n * unit if rank == 0 else 0]


def _content(g: Geometry, element_hashes: int, rank: int | None) -> int:
    return mix(element_hashes + (0 if rank is None else rank + 1) * GOLDEN) >> (64 - g.hash_bits)


def _scan(plan: PlanLike, g: Geometry, x: NDArray[np.float32]) -> tuple[dict[int, int], dict[str, int], int | None]:
    """The integer v of every nonzero element, the counts of section 5, and the exponent of the largest one."""
    words = x.view(np.uint32).tolist()
    values: dict[int, int] = {}
    counts = dict.fromkeys(("nonfinite", "overflow", "inexact", "inexact_single", "content"), 0)
    exponent: int | None = None
    for i, (x_i, w) in enumerate(zip(x.tolist(), words)):
        if x_i == 0:
            continue
        values[i] = 0
        counts["content"] += mix(i * GOLDEN + w)
        if not math.isfinite(x_i):
            counts["nonfinite"] += 1
            continue
        exact = Fraction(x_i)
        e = smallest_exponent(exact)
        exponent = e if exponent is None else max(exponent, e)
        if abs(exact) >= Fraction(2) ** plan.exponent:
            counts["overflow"] += 1
            continue
        in_units = exact / Fraction(2) ** g.unit_exponent
        values[i] = round(in_units)  # Fraction rounds ties to even
        counts["inexact"] += in_units.denominator != 1
        counts["inexact_single"] += (exact / Fraction(2) ** g.high_unit_exponent).denominator != 1
    return values, counts, exponent


def encode(plan: PlanLike, x: NDArray[np.float32], rank: int | None = None) -> NDArray[np.float64]:
    """One rank's wire.

    Args:
        plan: shared by all ranks.
        x: float32, shape ``(plan.numel,)``.
        rank: 0 to world_size - 1; None for an encoder that isn't told.

    Returns:
        float64, shape ``(wire_size(plan),)``, all of them integers.

    Raises:
        ConfigError: the plan is invalid, or ``x`` or ``rank`` is not what it says.
    """
    g = geometry(plan)
    if x.dtype != np.float32 or x.shape != (plan.numel,):
        raise ConfigError(f"encode wants float32 of shape ({plan.numel},), got {x.dtype} of shape {x.shape}")
    if rank is not None and not 0 <= rank < plan.world_size:
        raise ConfigError(f"rank {rank} is not in 0 .. {plan.world_size - 1}, the plan's world_size")
    values, counts, exponent = _scan(plan, g, np.ascontiguousarray(x))
    present = _keys(plan, g, values)
    wire = [0] * g.wire_size
    wire[:PILOTS] = _pilots(plan, g, rank)
    wire[PILOTS:CHECKSUM] = [
        g.fingerprint,
        len(values),
        len(present),
        counts["nonfinite"],
        counts["overflow"],
        counts["inexact"],
        counts["inexact_single"],
        int(len(present) > plan.capacity),
        len({i // plan.probe_block for i in values}),
        _content(g, counts["content"], rank),
    ]
    if exponent is not None:
        j = exponent + 148
        wire[HEADER_FIELDS + j // g.digits_per_cell] += (plan.world_size + 1) ** (j % g.digits_per_cell)
    wire[CHECKSUM] = checksum(g, wire[: g.header_size])
    if plan.index != "none":
        for key in list(present)[: plan.capacity]:
            _insert(plan, g, wire, key, present[key])
    return np.array(wire, dtype=np.float64)


def _insert(plan: PlanLike, g: Geometry, wire: list[int], key: int, values: Sequence[int]) -> None:
    if plan.index == "bitmap":
        wire[g.header_size + key // g.digits_per_cell] += (plan.world_size + 1) ** (key % g.digits_per_cell)
    key_id, cells = cells_of_key(g, key)
    for role, cell in enumerate(cells):
        start = g.table_start + cell * g.cell_size
        for j, number in enumerate(contribution(g, key_id, role) + list(values)):
            wire[start + j] += number
