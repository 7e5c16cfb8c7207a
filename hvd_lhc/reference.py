"""The reference: ``docs/wire-format.md`` in plain Python integers and fractions, slow and right by inspection.

Written from that document alone, independently of the C kernel, so that tests can hold the two against each other bit
for bit. Nothing here is meant for training. Sections named in comments are the document's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import numpy as np

from hvd_lhc.errors import ConfigError, DecodeError, WireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "Geometry",
    "PlanLike",
    "ReferenceHeader",
    "cells_of_key",
    "decode",
    "encode",
    "exact_sum",
    "geometry",
    "key_of_cell",
    "mix",
    "read_header",
    "round_once",
    "wire_size",
]

INDEX_CODES = {"none": 0, "keyed": 1, "bitmap": 2}
PRECISION_CODES = {"lossless": 0, "bounded": 1}
# limit, l0, f
TABLE_ROWS = (
    (16, 5, 64),
    (64, 6, 64),
    (128, 7, 64),
    (320, 8, 48),
    (512, 8, 64),
    (768, 9, 40),
    (2_048, 9, 64),
    (4_096, 10, 64),
    (16_384, 10, 80),
    (131_072, 11, 75),
    (1_048_576, 12, 72),
    (2**31 - 1, 13, 72),
)
# significant bits, exponent of the smallest normal number, exponent of the largest
FLOAT_FORMATS = {"float32": (24, -126, 127), "float16": (11, -14, 15), "bfloat16": (8, -126, 127)}
MAGNITUDE_CLASSES = 70
HEADER_FIELDS = 14
CHECKSUM = 13
GOLDEN = 0x9E3779B97F4A7C15
EPSILON = Fraction(1, 2**38)
WORD32 = 2**32
WORD64 = 2**64


class PlanLike(Protocol):
    """The fields of a plan (section 1); :class:`hvd_lhc.plan.Plan` has them."""

    @property
    def numel(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def index(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def value_lanes(self) -> int: ...
    @property
    def exponent(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def probe_block(self) -> int: ...


@dataclass(frozen=True)
class Geometry:
    """Everything that section 1 derives from a plan; the document's symbol stands behind each field."""

    keys: int  # K
    count_bits: int  # c
    cell_bits: int  # T
    value_bits: int  # b
    unit_exponent: int  # u
    single_unit_exponent: int  # max(E - b, -149)
    pilot_unit: int  # P
    digits_per_cell: int  # d
    magnitude_cells: int  # M = ceil(70 / d)
    header_size: int  # 14 + M
    bitmap_cells: int  # W, 0 unless bitmap
    key_bits: int  # kappa
    segment_bits: int  # l
    segment_cells: int  # L
    start_segments: int  # G
    cells: int  # m, 0 for index "none"
    ids: int  # I
    count_field_bits: int  # beta
    r_bits: int  # rho
    index_lanes: int
    cell_size: int  # S
    table_start: int
    wire_size: int
    fingerprint: int
    odds: tuple[int, int, int]  # odd1, odd2, odd3
    salt: int  # s4


@dataclass(frozen=True)
class ReferenceHeader:
    """The fields of :class:`hvd_lhc.codec.Header`, but with an exact ``factor``."""

    participants: int
    scale: str
    factor: Fraction
    nonzero_elements: int
    nonzero_keys: int
    nonfinite: int
    overflow: int
    inexact: int
    inexact_single: int
    over_capacity: int
    nonzero_probe_blocks: int
    content: int
    magnitude_exponent: int | None


def mix(h: int) -> int:
    """The 64-bit finalizer of section 3."""
    h %= WORD64
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD % WORD64
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 % WORD64
    return h ^ (h >> 33)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ------------------------------------------------------------------------------------------------ section 1, 2


def _check_ranges(plan: PlanLike) -> None:
    ranges = {
        "numel": (1, 2**48),
        "world_size": (1, 4096),
        "capacity": (1, 2**31 - 1),
        "block": (1, plan.numel),
        "value_lanes": (1, 2),
        "exponent": (-148, 128),
        "seed": (0, 2**64 - 1),
        "probe_block": (1, plan.numel),
    }
    for name, (low, high) in ranges.items():
        if not low <= getattr(plan, name) <= high:
            raise ConfigError(f"{name}={getattr(plan, name)} is not in {low} .. {high}; change {name}")
    if plan.index not in INDEX_CODES:
        raise ConfigError(f"index={plan.index!r} is none of {', '.join(INDEX_CODES)}; change index")
    if plan.precision not in PRECISION_CODES:
        raise ConfigError(f"precision={plan.precision!r} is none of {', '.join(PRECISION_CODES)}; change precision")


def _index_lanes(plan: PlanLike, beta: int, rho: int, cell_bits: int) -> int:
    if plan.index != "keyed":
        return 0
    if 3 * beta + 3 * rho <= cell_bits:
        return 1
    if 2 * beta + rho <= cell_bits and beta + 2 * rho <= cell_bits:
        return 2
    raise ConfigError(
        f"an index of {plan.numel} elements in blocks of {plan.block} doesn't fit the cells of {plan.world_size} ranks; "
        f"raise capacity={plan.capacity} or block={plan.block}, or use index='bitmap'"
    )


def _fingerprint(plan: PlanLike) -> int:
    h = mix(1)
    for field in (
        plan.numel,
        plan.world_size,
        plan.capacity,
        INDEX_CODES[plan.index],
        plan.block,
        plan.value_lanes,
        plan.exponent + 1024,
        PRECISION_CODES[plan.precision],
        plan.seed,
        plan.probe_block,
    ):
        h = mix(h ^ field)
    return h % WORD32


def geometry(plan: PlanLike) -> Geometry:
    """Everything that section 1 derives from the plan.

    Raises:
        ConfigError: the plan is invalid; the message names the field to change.
    """
    _check_ranges(plan)
    n = plan.world_size
    c = (n - 1).bit_length()
    t = min(49, 56 - (n + 2).bit_length())
    b = t - c - 4
    d = next(i for i in range(t, 0, -1) if (n + 1) ** i <= 2**t)
    if plan.numel * n > 2**t:
        raise ConfigError(f"numel={plan.numel} times world_size={n} is above 2^{t}; lower numel (split the gradient)")

    keys = _ceil_div(plan.numel, plan.block)
    kappa = (keys - 1).bit_length()
    _, l0, f = next(row for row in TABLE_ROWS if plan.capacity <= row[0])
    l = max(l0, (kappa + 2) // 3)  # noqa: E741, the document's name
    g = max(1, _ceil_div(plan.capacity * f, 64 * 2**l))
    ids = ((2**kappa - 1) >> l) // g + 1
    beta, rho = c + 4, (3 * ids - 1).bit_length()
    index_lanes = _index_lanes(plan, beta, rho, t)

    magnitude_cells = _ceil_div(MAGNITUDE_CLASSES, d)
    cells = 0 if plan.index == "none" else (g + 2) * 2**l
    bitmap_cells = _ceil_div(keys, d) if plan.index == "bitmap" else 0
    cell_size = index_lanes + plan.value_lanes * plan.block
    table_start = HEADER_FIELDS + magnitude_cells + bitmap_cells
    s = mix(plan.seed ^ 0x6C68632D73656564)
    return Geometry(
        keys=keys,
        count_bits=c,
        cell_bits=t,
        value_bits=b,
        unit_exponent=max(plan.exponent - plan.value_lanes * b, -149),
        single_unit_exponent=max(plan.exponent - b, -149),
        pilot_unit=6 * 2 ** (t - (n * (n + 1) * (2 * n + 1)).bit_length()),
        digits_per_cell=d,
        magnitude_cells=magnitude_cells,
        header_size=HEADER_FIELDS + magnitude_cells,
        bitmap_cells=bitmap_cells,
        key_bits=kappa,
        segment_bits=l,
        segment_cells=2**l,
        start_segments=g,
        cells=cells,
        ids=ids,
        count_field_bits=beta,
        r_bits=rho,
        index_lanes=index_lanes,
        cell_size=cell_size,
        table_start=table_start,
        wire_size=table_start + cells * cell_size,
        fingerprint=_fingerprint(plan),
        odds=(mix(s + 1) | 1, mix(s + 2) | 1, mix(s + 3) | 1),
        salt=mix(s + 4),
    )


def wire_size(plan: PlanLike) -> int:
    """Numbers in a wire of this plan (ConfigError as in :func:`geometry`)."""
    return geometry(plan).wire_size


# --------------------------------------------------------------------------------------------------- section 3


def _permute(g: Geometry, key: int) -> int:
    t, half, modulus = key, (g.key_bits + 1) // 2, 2**g.key_bits
    for odd in g.odds:
        t = t * odd % modulus
        t ^= t >> half
    return t


def _permute_back(g: Geometry, t: int) -> int:
    half, modulus = (g.key_bits + 1) // 2, 2**g.key_bits
    for odd in reversed(g.odds):
        t ^= t >> half  # undoes itself, since 2 half >= key_bits
        t = t * pow(odd, -1, modulus) % modulus
    return t


def _offsets(g: Geometry, segment: int, key_id: int) -> tuple[int, int, int]:
    """0, f1, f2: how far the three cells of a key are shifted within their segments."""
    h = mix(g.salt ^ (segment * GOLDEN % WORD64))
    ia, ib = key_id % g.segment_cells, key_id >> g.segment_bits
    f1 = (ia * (h | 1) + (h >> 32)) % WORD64 % g.segment_cells
    f2 = (mix(h + ia) + ib * ((h >> 16) | 1)) % WORD64 % g.segment_cells
    return 0, f1, f2


def cells_of_key(g: Geometry, key: int) -> tuple[int, tuple[int, int, int]]:
    """The id of a key and its three cells, by role."""
    t = _permute(g, key)
    o0, q = t % g.segment_cells, t >> g.segment_bits
    segment, key_id = q % g.start_segments, q // g.start_segments
    c0, c1, c2 = (
        (segment + role) * g.segment_cells + (o0 + shift) % g.segment_cells
        for role, shift in enumerate(_offsets(g, segment, key_id))
    )
    return key_id, (c0, c1, c2)


def key_of_cell(g: Geometry, cell: int, role: int, key_id: int) -> int | None:
    """The key with this id that has this role in this cell, or None if there is none."""
    segment = cell // g.segment_cells - role
    if not (0 <= key_id < g.ids and 0 <= segment < g.start_segments):
        return None
    o0 = (cell - _offsets(g, segment, key_id)[role]) % g.segment_cells
    t = (key_id * g.start_segments + segment) * g.segment_cells + o0
    if t >= 2**g.key_bits:  # outside the domain of the bijection
        return None
    key = _permute_back(g, t)
    return key if key < g.keys else None


# ------------------------------------------------------------------------------------------------ section 4, 5


def _contribution(g: Geometry, key_id: int, role: int) -> list[int]:
    """What one insertion adds to the index lanes of a cell."""
    r, beta, rho = 3 * key_id + role, g.count_field_bits, g.r_bits
    if g.index_lanes == 0:
        return []
    if g.index_lanes == 1:
        return [1 + r * 2**beta + r**2 * 2 ** (2 * beta + rho)]
    return [1 + r * 2**beta, r**2]


def _lanes(g: Geometry, plan: PlanLike, values: Sequence[int]) -> list[int]:
    """The value lanes of one key: all high values, then all low ones."""
    if plan.value_lanes == 1:
        return list(values)
    unit = 2**g.value_bits
    high = [v // unit if v >= 0 else -(-v // unit) for v in values]  # towards zero
    return high + [v - h * unit for v, h in zip(values, high, strict=True)]


def _smallest_exponent(x: Fraction) -> int:
    """The smallest e with |x| < 2^e, x not zero."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    while abs(x) >= Fraction(2) ** e:
        e += 1
    while abs(x) < Fraction(2) ** (e - 1):
        e -= 1
    return e


def _checksum(header: Sequence[int]) -> int:
    return sum((2 * p + 1) * value for p, value in enumerate(header) if p != CHECKSUM) % WORD32


def _pilots(plan: PlanLike, g: Geometry, rank: int | None) -> list[int]:
    n, unit = plan.world_size, g.pilot_unit
    if rank is None:
        return [unit, (n + 1) * (2 * n + 1) * unit // 6, -(n + 1) * unit // 2]
    return [unit, (rank + 1) ** 2 * unit, -(rank + 1) * unit]


def _content(plan: PlanLike, g: Geometry, element_hashes: int, rank: int | None) -> int:
    numbered = element_hashes + (0 if rank is None else rank + 1) * GOLDEN
    return mix(numbered) >> (64 - (g.cell_bits - (plan.world_size - 1).bit_length()))


def _scan(plan: PlanLike, g: Geometry, x: NDArray[np.float32]) -> tuple[dict[int, int], dict[str, int], int | None]:
    """The integer v of every nonzero element, the counts of section 5, and the exponent of the largest one."""
    words = x.view(np.uint32).tolist()
    values: dict[int, int] = {}
    counts = dict.fromkeys(("nonfinite", "overflow", "inexact", "inexact_single", "content"), 0)
    exponent: int | None = None
    for i, (x_i, w) in enumerate(zip(x.tolist(), words, strict=True)):
        if x_i == 0:
            continue
        values[i] = 0
        counts["content"] += mix(i * GOLDEN + w)
        if not math.isfinite(x_i):
            counts["nonfinite"] += 1
            continue
        exact = Fraction(x_i)
        e = _smallest_exponent(exact)
        exponent = e if exponent is None else max(exponent, e)
        if abs(exact) >= Fraction(2) ** plan.exponent:
            counts["overflow"] += 1
            continue
        in_units = exact / Fraction(2) ** g.unit_exponent
        values[i] = round(in_units)  # Fraction rounds ties to even
        counts["inexact"] += in_units.denominator != 1
        counts["inexact_single"] += (exact / Fraction(2) ** g.single_unit_exponent).denominator != 1
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
    present = sorted({i // plan.block for i in values})
    wire = [0] * g.wire_size
    wire[0:3] = _pilots(plan, g, rank)
    wire[3:13] = [
        g.fingerprint,
        len(values),
        len(present),
        counts["nonfinite"],
        counts["overflow"],
        counts["inexact"],
        counts["inexact_single"],
        int(len(present) > plan.capacity),
        len({i // plan.probe_block for i in values}),
        _content(plan, g, counts["content"], rank),
    ]
    if exponent is not None:
        j = (exponent + 148) // 4
        wire[HEADER_FIELDS + j // g.digits_per_cell] += (plan.world_size + 1) ** (j % g.digits_per_cell)
    wire[CHECKSUM] = _checksum(wire[: g.header_size])
    if plan.index != "none":
        for key in present[: plan.capacity]:
            _insert(plan, g, wire, key, [values.get(key * plan.block + j, 0) for j in range(plan.block)])
    return np.array(wire, dtype=np.float64)


def _insert(plan: PlanLike, g: Geometry, wire: list[int], key: int, values: Sequence[int]) -> None:
    if plan.index == "bitmap":
        wire[g.header_size + key // g.digits_per_cell] += (plan.world_size + 1) ** (key % g.digits_per_cell)
    lanes = _lanes(g, plan, values)
    key_id, cells = cells_of_key(g, key)
    for role, cell in enumerate(cells):
        start = g.table_start + cell * g.cell_size
        for j, number in enumerate(_contribution(g, key_id, role) + lanes):
            wire[start + j] += number


# --------------------------------------------------------------------------------------------------- section 6


def _refuse(reason: str, message: str, header: ReferenceHeader | None = None) -> NoReturn:
    raise DecodeError(message, reason=reason, header=cast("Any", header))


def _close(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= EPSILON * abs(b)


def _some_ranks(n: int, p0: Fraction, p1: Fraction, p2: Fraction) -> int | None:
    """How many distinct ranks these pilots (already multiplied by phi) describe, or None (step 3)."""
    m, a, q = round(p0), round(-p2), round(p1)
    plausible = (
        _close(Fraction(m), p0)
        and _close(Fraction(a), -p2)
        and _close(Fraction(q), p1)
        and 1 <= m < n
        and m * (m + 1) <= 2 * a <= 2 * m * n - m * (m - 1)
        and (m * q - a * a == 0 if m == 1 else 12 * (m * q - a * a) >= m**2 * (m**2 - 1))
        and q <= m * n**2
        and a % 2 == q % 2
    )
    return m if plausible else None


def _read_scale(plan: PlanLike, g: Geometry, wire: NDArray[np.float64]) -> tuple[int, str, Fraction]:
    """Participants, scale and factor."""
    n = plan.world_size
    p0, p1, p2 = (Fraction(float(wire[p])) / g.pilot_unit for p in range(3))
    # two binary64 divisions, as the document writes it
    factor = Fraction(float(wire[0]) / float(g.pilot_unit) / float(n))
    if p0 > 0 and factor > 0:
        if _close(p1, p0 * (n + 1) * (2 * n + 1) / 6) and _close(-p2, p0 * (n + 1) / 2):
            if _close(p0 / n, Fraction(1)):
                return n, "sum", Fraction(1)
            if _close(p0, Fraction(1)):
                return n, "average", Fraction(1, n)
            return n, "other", factor
        for phi, scale, factor in ((1, "sum", Fraction(1)), (n, "average", Fraction(1, n))):
            participants = _some_ranks(n, phi * p0, phi * p1, phi * p2)
            if participants is not None:
                return participants, scale, factor
    return _refuse(
        "not_linear",
        f"the pilots {wire[:3].tolist()} are not those of a sum over {n} ranks; reduce with op=Sum or op=Average",
    )


def _integer(z: float, factor: Fraction, where: int, header: ReferenceHeader | None = None) -> int:
    """The integer that number ``where`` of the wire stands for (end of section 6)."""
    if not math.isfinite(z):
        _refuse("not_finite", f"number {where} of the wire is {z}", header)
    exact = Fraction(z) / factor
    nearest = round(exact)
    if abs(exact - nearest) > Fraction(1, 4) or abs(nearest) >= 2**53:
        _refuse("not_integer", f"number {where} of the wire, {z} / {factor}, is not an integer below 2^53", header)
    return nearest


# --------------------------------------------------------------------------------------------------- section 7


def _digits(plan: PlanLike, g: Geometry, cells: Sequence[int], count: int, participants: int) -> list[int] | None:
    """The ``count`` digits in these cells; None if they are none: above ``participants``, or beyond ``count``."""
    digits: list[int] = []
    for cell in cells:
        if not 0 <= cell < (plan.world_size + 1) ** g.digits_per_cell:
            return None
        for _ in range(g.digits_per_cell):
            digits.append(cell % (plan.world_size + 1))
            cell //= plan.world_size + 1
    if max(digits) > participants or any(digits[count:]):
        return None
    return digits[:count]


def read_header(plan: PlanLike, wire: NDArray[np.float64]) -> ReferenceHeader:
    """Steps 1 and 2 of section 7: what the reduced wire's header says.

    Args:
        plan: shared by all ranks.
        wire: float64, shape ``(wire_size(plan),)``.

    Raises:
        ConfigError: the plan is invalid.
        WireError: another size, dtype or fingerprint.
        DecodeError: ``not_finite``, ``not_linear``, ``not_integer``, ``checksum`` or (magnitude digits) ``count``.
    """
    g = geometry(plan)
    if wire.dtype != np.float64 or wire.shape != (g.wire_size,):
        raise WireError(f"this plan's wire is float64 of shape ({g.wire_size},), got {wire.dtype} of {wire.shape}")
    numbers = wire[: g.header_size].tolist()
    for p, z in enumerate(numbers):
        if not math.isfinite(z):
            _refuse("not_finite", f"number {p} of the wire is {z}")
    participants, scale, factor = _read_scale(plan, g, wire)
    fields = [participants * g.pilot_unit, *(round(Fraction(z) / factor) for z in numbers[1:3])]
    fields += [_integer(z, factor, p) for p, z in enumerate(numbers) if p >= 3]
    if fields[3] != participants * g.fingerprint:
        raise WireError("the wire was encoded under another plan (its fingerprint is another); share one plan")
    if (_checksum(fields) - fields[CHECKSUM]) % WORD32 != 0:
        _refuse("checksum", "the header's checksum is wrong")
    classes = _digits(plan, g, fields[HEADER_FIELDS:], MAGNITUDE_CLASSES, participants)
    if classes is None:
        _refuse("count", "the header's magnitude digits are none")
    highest = max((j for j, ranks in enumerate(classes) if ranks), default=None)
    return ReferenceHeader(
        participants,
        scale,
        factor,
        *fields[4:13],
        magnitude_exponent=None if highest is None else min(4 * highest - 145, 128),
    )


def _check_parity(plan: PlanLike, g: Geometry, table: list[list[int]], header: ReferenceHeader) -> None:
    for lane in range(g.index_lanes, g.cell_size):
        sums = [0, 0, 0]
        for cell, numbers in enumerate(table):
            sums[cell // g.segment_cells % 3] += numbers[lane]
        if len({s % WORD64 for s in sums}) != 1:
            _refuse("parity", f"lane {lane} of the table sums to {sums} over its three classes of segments", header)


def _remove(g: Geometry, table: list[list[int]], key: int, count: int, values: Sequence[int]) -> None:
    """Subtract a key's values, and ``count`` times its index, from its three cells."""
    key_id, cells = cells_of_key(g, key)
    for role, cell in enumerate(cells):
        subtrahend = [count * number for number in _contribution(g, key_id, role)] + list(values)
        table[cell] = [a - b for a, b in zip(table[cell], subtrahend, strict=True)]


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
    """Key, count and lanes of everything that can be peeled; the table keeps the rest."""
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
    """Steps 4 to 6: the lanes of every key in the union. ``numbers``: the wire behind its header, as integers."""
    body = numbers[g.bitmap_cells :]
    table = [list(body[i * g.cell_size : (i + 1) * g.cell_size]) for i in range(g.cells)]
    _check_parity(plan, g, table, header)
    digits: list[int] | None = []
    if plan.index == "bitmap":
        digits = _digits(plan, g, numbers[: g.bitmap_cells], g.keys, header.participants)
        if digits is None:
            _refuse("count", "the bitmap has digits that can't be", header)
        peeled = list(_peel_bitmap(g, table, digits))
        # A core that can't be peeled may hold nonzero values and yet sum to zero in every cell.
        complete = len(peeled) == sum(digit != 0 for digit in digits)
    else:
        peeled = list(_peel_keyed(g, table, header.participants))
        complete = True  # whatever was not peeled left its index in the table
    if not complete or any(number != 0 for cell in table for number in cell):
        _refuse("unpeeled", f"only {len(peeled)} keys could be peeled; raise capacity={plan.capacity}", header)
    total = sum(count for _, count, _ in peeled)
    if total != header.nonzero_keys:
        _refuse("count", f"the keys were inserted {total} times, the header says {header.nonzero_keys}", header)
    return {key: lanes for key, _, lanes in peeled}


def _check_flags(plan: PlanLike, header: ReferenceHeader) -> None:
    """Step 3: the ranks' own words that the wire does not hold the gradient."""
    for reason in ("nonfinite", "overflow", "over_capacity", "inexact"):
        count = getattr(header, reason)
        if count != 0 and not (reason == "inexact" and plan.precision == "bounded"):
            _refuse(reason, f"the ranks declared {reason}={count}", header)
    if plan.index == "none":
        _refuse("header_only", "a wire with index='none' is a header and no gradient", header)


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
    tail = wire[g.header_size :].tolist()
    numbers = [_integer(z, header.factor, g.header_size + p, header) if z != 0 else 0 for p, z in enumerate(tail)]
    x = np.zeros(plan.numel, np.float32)
    unit = Fraction(2) ** g.unit_exponent * header.factor
    for key, lanes in _peel(plan, g, numbers, header).items():
        values = lanes[: plan.block]
        if plan.value_lanes == 2:
            low = lanes[plan.block :]
            values = [h * 2**g.value_bits + v for h, v in zip(values, low, strict=True)]
        for i, v in enumerate(values, start=key * plan.block):
            if i < plan.numel:
                x[i] = round_once(v * unit, dtype)
            elif v != 0:
                _refuse("unpeeled", f"key {key} has a value beyond the last element", header)
    return x


# ------------------------------------------------------------------------------------------- rounding, the oracle


def round_once(value: Fraction, dtype: str) -> float:
    """The nearest number of a format, ties to even, with subnormals; infinite beyond its range; zero is +0.

    Args:
        value: exact.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """
    precision, smallest, largest = FLOAT_FORMATS[dtype]
    if value == 0:
        return 0.0
    exponent = max(_smallest_exponent(value) - 1, smallest)  # 2^exponent <= |value|, where it is normal
    spacing = exponent - (precision - 1)
    multiple = round(abs(value) / Fraction(2) ** spacing)  # Fraction rounds ties to even
    if multiple == 0:
        return 0.0
    if multiple * Fraction(2) ** spacing >= Fraction(2) ** (largest + 1):
        return math.copysign(math.inf, value)
    return math.copysign(math.ldexp(multiple, spacing), value)


def exact_sum(xs: Sequence[NDArray[np.float32]], dtype: str = "float32", divisor: int = 1) -> NDArray[np.float32]:
    """The dense oracle: per element the exact sum over ranks, divided by ``divisor``, rounded once.

    Args:
        xs: finite float32 arrays of one shape ``(numel,)``.
        dtype: as in :func:`round_once`.
        divisor: 1 for a sum, the number of ranks for an average.

    Returns:
        float32, shape ``(numel,)``.
    """
    columns = zip(*(x.tolist() for x in xs), strict=True)
    sums = [round_once(sum((Fraction(v) for v in column), Fraction(0)) / divisor, dtype) for column in columns]
    return np.array(sums, dtype=np.float32)
