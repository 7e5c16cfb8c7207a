"""The hash function of section 3."""

from __future__ import annotations

__all__ = ["GOLDEN", "WORD64", "mix"]

GOLDEN = 0x9E3779B97F4A7C15
WORD64 = 2**64


def mix(h: int) -> int:
    """The 64-bit finalizer of section 3."""
    h %= WORD64
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD % WORD64
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 % WORD64
    return h ^ (h >> 33)
