"""Which ranks a reduced wire came from, where some are missing from it.

After Horovod's ``join`` a rank takes part with zeros, and answers every further reduction. A rank that is missing because
the reduction went over a process set answers nothing: a dense reduction over the compressor's own ranks would wait for it
for ever. The pilots tell the two apart, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Moments", "are_one_of", "moments_of_ranks", "moments_of_wire", "subsets_of"]


class Moments(NamedTuple):
    """What pilots tell about a set of ranks: how many they are, the sum of their (rank + 1), and of its squares."""

    participants: int
    total: int
    squares: int


def moments_of_ranks(ranks: Sequence[int]) -> Moments:
    """The moments of ranks that are known."""
    return Moments(len(ranks), sum(rank + 1 for rank in ranks), sum((rank + 1) ** 2 for rank in ranks))


def moments_of_wire(wire: NDArray[np.float64], participants: int) -> Moments:
    """The moments of the ranks that took part in a reduced wire whose header was checked (docs/wire-format.md, section 5).

    Args:
        wire: float64, reduced; its positions 0 to 2 hold the pilots, all multiplied by the same factor.
        participants: ``Header.participants``.
    """
    constant, square, negative = (float(pilot) for pilot in wire[:3])
    return Moments(participants, round(-negative / constant * participants), round(square / constant * participants))


def are_one_of(moments: Moments, rank_sets: Iterable[Sequence[int]]) -> bool:
    """Do the moments belong to one of these sets of ranks?"""
    return any(moments == moments_of_ranks(ranks) for ranks in rank_sets)


def subsets_of(ranks: Sequence[int], rank_sets: Iterable[Sequence[int]]) -> list[list[int]]:
    """Those of some sets of ranks that lie within ``ranks`` but are not all of it, as positions in ``ranks``."""
    position = {rank: i for i, rank in enumerate(ranks)}
    inside = [others for others in rank_sets if len(others) < len(ranks) and position.keys() >= set(others)]
    return [[position[rank] for rank in others] for others in inside]
