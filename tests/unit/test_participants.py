"""Ranks that are missing from a wire: joined, or outside the process set that the reduction went over."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_lhc import UnsupportedError
from hvd_lhc.codec import Codec
from hvd_lhc.compressor import Engine, Phase
from hvd_lhc.participants import are_one_of, moments_of_ranks, moments_of_wire, subsets_of
from hvd_lhc.plan import Plan
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor

TENSOR = Tensor(numel=40_000, row=1, element_bytes=4)


@pytest.mark.parametrize("scale", [1.0, 1 / 5])
@pytest.mark.parametrize("ranks", [[0], [4], [0, 2], [1, 2, 4], [0, 1, 2, 3]])
def test_the_pilots_tell_which_ranks_took_part(ranks: list[int], scale: float) -> None:
    """Count, sum and sum of squares come out of a reduced wire, whatever it was scaled by."""
    codec = Codec(Plan(numel=100, world_size=5, capacity=8))
    wire = sum(codec.encode(np.zeros(100, np.float32), rank=rank) for rank in ranks) * scale
    participants = codec.read_header(wire).participants
    assert participants == len(ranks)
    assert moments_of_wire(wire, participants) == moments_of_ranks(ranks)


def test_sets_of_equal_size_are_told_apart() -> None:
    """Ranks 0 and 2 are not ranks 0 and 1."""
    assert are_one_of(moments_of_ranks([0, 2]), [[1, 2], [0, 2]])
    assert not are_one_of(moments_of_ranks([0, 2]), [[1, 2], [0, 1]])


def test_subsets_are_counted_within_the_compressors_ranks() -> None:
    """Only true subsets, as positions; sets that reach outside don't matter."""
    assert subsets_of([2, 4, 6], [[0, 2, 4, 6], [2, 4, 6], [4, 6], [0, 2]]) == [[1, 2]]


def run_two_of_three(process_sets: list[list[int]]) -> str | None:
    """Ranks 0 and 2 of three reduce a first gradient; why it isn't decoded."""
    engine = Engine(Settings(), lambda: process_sets)
    phase = Phase()
    tickets = [engine.begin(phase, rank, TENSOR, 3) for rank in (0, 2)]
    gradient = np.zeros(40_000, np.float32)
    gradient[5] = 1
    wires = [
        engine.encode(ticket, gradient, rank) for ticket, rank in zip(tickets, (0, 2), strict=True) if ticket is not None
    ]
    assert tickets[0] is not None
    return engine.finish(tickets[0], np.sum(wires, axis=0), "float32").reason


def test_a_process_set_that_was_not_named_is_refused() -> None:
    """A dense reduction over all ranks would wait for rank 1 for ever."""
    with pytest.raises(UnsupportedError, match=r"LHC\(process_set=S\)"):
        run_two_of_three([[0, 1], [0, 2]])


def test_a_rank_that_has_joined_is_welcome() -> None:
    """Where no process set has these ranks, the third one has joined and answers."""
    assert run_two_of_three([[0, 1], [1, 2]]) == "header_only"
