"""Section 3: where a key's three cells are, and which key a cell holds."""

from __future__ import annotations

from hvd_lhc.reference.layout import Geometry
from hvd_lhc.reference.mixing import GOLDEN, WORD64, mix

__all__ = ["cells_of_key", "key_of_cell"]


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
    j = (ia * (h | 1) + (h >> 32)) % g.segment_cells
    j ^= j >> ((g.segment_bits + 1) // 2)
    f1 = j * ((h >> 16) | 1) % g.segment_cells
    w = mix(h + ia)
    f2 = (w + ib * ((w >> 16) | 1)) % WORD64 % g.segment_cells
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
