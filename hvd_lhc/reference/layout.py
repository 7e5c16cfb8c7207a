"""Sections 1 and 2: what a plan is made of, and everything that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hvd_lhc.errors import ConfigError
from hvd_lhc.reference.mixing import mix

__all__ = ["Geometry", "PlanLike", "geometry", "wire_size"]

INDEX_CODES = {"none": 0, "keyed": 1, "bitmap": 2}
PRECISION_CODES = {"lossless": 0, "bounded": 1}
# limit, l0, f
TABLE_ROWS = (
    (8, 5, 64),
    (13, 5, 315),
    (17, 5, 361),
    (21, 6, 195),
    (35, 6, 234),
    (47, 6, 261),
    (59, 7, 138),
    (98, 7, 167),
    (132, 7, 186),
    (164, 8, 99),
    (194, 7, 211),
    (275, 8, 119),
    (488, 8, 67),
    (661, 8, 74),
    (800, 9, 40),
    (1_300, 9, 50),
    (1_700, 9, 57),
    (2_000, 10, 32),
    (2_900, 10, 44),
    (3_500, 10, 56),
    (4_300, 11, 30),
    (6_000, 11, 43),
    (16_384, 10, 78),
    (131_072, 11, 74),
    (1_048_576, 12, 72),
    (2**31 - 1, 13, 72),
)
MAGNITUDE_CLASSES = 277
HEADER_FIELDS = 15
PILOTS = 4
CHECKSUM = 14


class PlanLike(Protocol):
    """The fields of a plan (section 1); :class:`hvd_lhc.plan.Plan` has them."""

    @property
    def numel(self) -> int:
        """D: elements of the gradient."""

    @property
    def world_size(self) -> int:
        """N: ranks whose wires are added."""

    @property
    def capacity(self) -> int:
        """Distinct keys that the table is made for."""

    @property
    def index(self) -> str:
        """``"none"``, ``"keyed"`` or ``"bitmap"``."""

    @property
    def block(self) -> int:
        """B: consecutive elements per key."""

    @property
    def parts(self) -> int:
        """1 or 2."""

    @property
    def exponent(self) -> int:
        """E: every element is below 2^E."""

    @property
    def precision(self) -> str:
        """``"lossless"`` or ``"bounded"``."""

    @property
    def seed(self) -> int:
        """Selects the hash functions."""

    @property
    def probe_block(self) -> int:
        """Elements of the blocks that the header counts."""


@dataclass(frozen=True)
class Geometry:
    """Everything that section 1 derives from a plan; the document's symbol stands behind each field."""

    blocks: int  # K
    keys: int  # U
    count_bits: int  # c
    full_bits: int  # H
    cell_bits: int  # T
    hash_bits: int  # s
    checksum_bits: int  # min(32, s)
    value_bits: int  # b
    high_unit_exponent: int  # v
    unit_exponent: int  # u
    low_bits: int  # v - u
    pilot_unit: int  # P
    digits_per_cell: int  # d
    magnitude_cells: int  # Y = ceil(277 / d)
    header_size: int  # 15 + Y
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


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _check_ranges(plan: PlanLike) -> None:
    ranges = {
        "numel": (1, 2**48),
        "world_size": (1, 4096),
        "capacity": (1, 2**31 - 1),
        "block": (1, plan.numel),
        "parts": (1, 2),
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
    h = mix(3)
    for field in (
        plan.numel,
        plan.world_size,
        plan.capacity,
        INDEX_CODES[plan.index],
        plan.block,
        plan.parts,
        plan.exponent + 1024,
        PRECISION_CODES[plan.precision],
        plan.seed,
        plan.probe_block,
    ):
        h = mix(h ^ field)
    return h


def geometry(plan: PlanLike) -> Geometry:
    """Everything that section 1 derives from the plan.

    Raises:
        ConfigError: the plan is invalid; the message names the field to change.
    """
    _check_ranges(plan)
    n = plan.world_size
    c = (n - 1).bit_length()
    full = 51 - (3 * n // 2 + 5).bit_length()
    t = min(49, full + 5)
    b = t - c - 4
    d = next(i for i in range(full, 0, -1) if (n + 1) ** i <= 2**full)
    checksum_bits = min(32, full - c)
    if plan.numel * n > 2**t:
        raise ConfigError(f"numel={plan.numel} times world_size={n} is above 2^{t}; lower numel (split the gradient)")

    blocks = _ceil_div(plan.numel, plan.block)
    keys = plan.parts * blocks
    high_unit = max(plan.exponent - b, -149)
    unit = high_unit if plan.parts == 1 else max(high_unit - b, -149)
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
    cell_size = index_lanes + plan.block
    table_start = HEADER_FIELDS + magnitude_cells + bitmap_cells
    s = mix(plan.seed ^ 0x6C68632D73656564)
    return Geometry(
        blocks=blocks,
        keys=keys,
        count_bits=c,
        full_bits=full,
        cell_bits=t,
        hash_bits=full - c,
        checksum_bits=checksum_bits,
        value_bits=b,
        high_unit_exponent=high_unit,
        unit_exponent=unit,
        low_bits=high_unit - unit,
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
        fingerprint=_fingerprint(plan) % 2**checksum_bits,
        odds=(mix(s + 1) | 1, mix(s + 2) | 1, mix(s + 3) | 1),
        salt=mix(s + 4),
    )


def wire_size(plan: PlanLike) -> int:
    """Numbers in a wire of this plan (ConfigError as in :func:`geometry`)."""
    return geometry(plan).wire_size
