"""Section 7, from step 3: refusing, peeling, verifying, rounding."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from hvd_lhc.errors import ConfigError
from hvd_lhc.reference.encode import contribution
from hvd_lhc.reference.header import ReferenceHeader, digits_of, read_header, refuse, unscaled_integer
from hvd_lhc.reference.layout import Geometry, PlanLike, geometry
from hvd_lhc.reference.mixing import WORD64
from hvd_lhc.reference.placement import cells_of_key, key_of_cell
from hvd_lhc.reference.rounding import FLOAT_FORMATS, round_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["decode"]


def _check_parity(plan: PlanLike, g: Geometry, table: list[list[int]], header: ReferenceHeader) -> None:
    for lane in range(g.index_lanes, g.cell_size):
        sums = [0, 0, 0]
        for cell, numbers in enumerate(table):
            sums[cell // g.segment_cells % 3] += numbers[lane]
        if len({s % WORD64 for s in sums}) != 1:
            refuse("parity", f"number {lane} of the cells sums to {sums} over its three classes of segments", header)


def _remove(g: Geometry, table: list[list[int]], key: int, count: int, values: Sequence[int]) -> None:
    """Subtract a key's values, and ``count`` times its index, from its three cells."""
    key_id, cells = cells_of_key(g, key)
    for role, cell in enumerate(cells):
        subtrahend = [count * number for number in contribution(g, key_id, role)] + list(values)
        table[cell] = [a - b for a, b in zip(table[cell], subtrahend)]


def _pure_key(g: Geometry, cell: int, numbers: Sequence[int], participants: int) -> tuple[int, int] | None:
    """The only key in this cell, and how many ranks inserted it; None if the cell isn't pure (keyed)."""
    first, beta, rho = numbers[0], g.count_field_bits, g.r_bits
    if first <= 0:
        return None
    c, big_r = first % 2**beta, first >> beta
    if g.index_lanes == 1:
        big_r, q = big_r % 2 ** (beta + rho), first >> (2 * beta + rho)
    else:
        q = numbers[1]
    if not 1 <= c <= participants or big_r % c != 0 or q != c * (big_r // c) ** 2:
        return None
    r = big_r // c
    key = key_of_cell(g, cell, r % 3, r // 3)
    return None if key is None else (key, c)


def _peel_keyed(g: Geometry, table: list[list[int]], participants: int) -> Iterator[tuple[int, int, list[int]]]:
    """Key, count and values of everything that can be peeled; the table keeps the rest."""
    progress = True
    while progress:
        progress = False
        for cell in range(g.cells):
            pure = _pure_key(g, cell, table[cell], participants)
            if pure is not None:
                key, count = pure
                values = table[cell][g.index_lanes :]
                _remove(g, table, key, count, values)
                progress = True
                yield key, count, values


def _peel_bitmap(
    g: Geometry, table: list[list[int]], digits: Sequence[int]
) -> Iterator[tuple[int, int, list[int]]]:
    """As :func:`_peel_keyed`, where the digits say which keys are there."""
    keys_in: list[set[int]] = [set() for _ in range(g.cells)]
    for key, count in enumerate(digits):
        if count:
            for cell in cells_of_key(g, key)[1]:
                keys_in[cell].add(key)
    progress = True
    while progress:
        progress = False
        for cell in range(g.cells):
            if len(keys_in[cell]) == 1:
                (key,) = keys_in[cell]
                values = list(table[cell])
                _remove(g, table, key, 0, values)
                for other in cells_of_key(g, key)[1]:
                    keys_in[other].discard(key)
                progress = True
                yield key, digits[key], values


def _peel(plan: PlanLike, g: Geometry, numbers: Sequence[int], header: ReferenceHeader) -> dict[int, list[int]]:
    """Steps 4 to 6: the values of every key in the union. ``numbers``: the wire behind its header, as integers."""
    body = numbers[g.bitmap_cells :]
    table = [list(body[i * g.cell_size : (i + 1) * g.cell_size]) for i in range(g.cells)]
    _check_parity(plan, g, table, header)
    digits: list[int] | None = []
    if plan.index == "bitmap":
        digits = digits_of(plan, g, numbers[: g.bitmap_cells], g.keys, header.participants)
        if digits is None:
            refuse("count", "the bitmap has digits that can't be", header)
        if sum(digits) != header.nonzero_keys:
            refuse("count", f"the bitmap counts {sum(digits)} keys, the header {header.nonzero_keys}", header)
        peeled = list(_peel_bitmap(g, table, digits))
        # A core that can't be peeled may hold nonzero values and yet sum to zero in every cell.
        complete = len(peeled) == sum(digit != 0 for digit in digits)
    else:
        peeled = list(_peel_keyed(g, table, header.participants))
        complete = True  # whatever was not peeled left its index in the table
    if not complete or any(number != 0 for cell in table for number in cell):
        refuse("unpeeled", f"only {len(peeled)} keys could be peeled; raise capacity={plan.capacity}", header)
    if any(abs(value) > plan.world_size * 2**g.value_bits for _, _, values in peeled for value in values):
        refuse("count", "a key has a value that no sum of ranks can have", header)
    total = sum(count for _, count, _ in peeled)
    if total != header.nonzero_keys:
        refuse("count", f"the keys were inserted {total} times, the header says {header.nonzero_keys}", header)
    return {key: values for key, _, values in peeled}


def _join_parts(g: Geometry, keys: dict[int, list[int]], header: ReferenceHeader) -> dict[int, list[int]]:
    """The value of every element of every block in the union: high and low part put together."""
    low = {key - g.blocks: values for key, values in keys.items() if key >= g.blocks}
    blocks = {key: [v * 2**g.low_bits for v in values] for key, values in keys.items() if key < g.blocks}
    if low and not header.inexact_single:
        refuse("count", "there are low parts, and the header knows of none", header)
    for block, values in low.items():
        if block not in blocks:
            refuse("count", f"block {block} has a low part without a high one", header)
        blocks[block] = [v + v_low for v, v_low in zip(blocks[block], values)]
    return blocks


def _check_flags(plan: PlanLike, header: ReferenceHeader) -> None:
    """Step 3: the ranks' own words that the wire does not hold the gradient."""
    for reason in ("nonfinite", "overflow", "over_capacity", "inexact"):
        count = getattr(header, reason)
        if count != 0 and not (reason == "inexact" and plan.precision == "bounded"):
            refuse(reason, f"the ranks declared {reason}={count}", header)
    if plan.index == "none":
        refuse("header_only", "a wire with index='none' is a header and no gradient", header)


def decode(plan: PlanLike, wire: NDArray[np.float64], dtype: str = "float32") -> NDArray[np.float32]:
    """The sum of what the ranks encoded, times the reduction's factor, rounded once; or an exception.

    Args:
        plan: shared by all ranks.
        wire: float64, shape ``(wire_size(plan),)``: the reduced wire.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``, which the values are rounded to.

    Returns:
        float32, shape ``(plan.numel,)``.

    Raises:
        ConfigError: the plan or the dtype is invalid.
        WireError: the wire is not one of this plan.
        DecodeError: a check of section 7 failed.
    """
    if dtype not in FLOAT_FORMATS:
        raise ConfigError(f"dtype={dtype!r} is none of {', '.join(FLOAT_FORMATS)}")
    header = read_header(plan, wire)
    g = geometry(plan)
    _check_flags(plan, header)
    scale, factor = header.scale, header.factor
    positions = range(g.header_size, g.wire_size)
    numbers = [unscaled_integer(float(wire[p]), scale, factor, p, header) if wire[p] else 0 for p in positions]
    x = np.zeros(plan.numel, np.float32)
    unit = Fraction(2) ** g.unit_exponent * header.factor
    for block, values in _join_parts(g, _peel(plan, g, numbers, header), header).items():
        for i, v in enumerate(values, start=block * plan.block):
            if i < plan.numel:
                x[i] = round_once(v * unit, dtype)
            elif v != 0:
                refuse("count", f"block {block} has a value beyond the last element", header)
    return x
