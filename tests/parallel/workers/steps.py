"""What the suites share about steps of one tensor: gradients to reduce, what happened to them, and what must come out."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

from exact import Array, assert_same_bits, draw_gradients, exact_sum


def count(lhc: Any) -> dict[str, int]:
    """How many tensors went which way so far; retries by reason."""
    statistics = lhc.statistics
    kinds = {"sketch": statistics.sketches, "probe": statistics.probes, "dense": statistics.dense}
    assert sum(statistics.refusals.values()) == statistics.retries
    return {**kinds, **statistics.refusals}


def difference(before: dict[str, int], after: dict[str, int]) -> str:
    """What happened to the one tensor between two counts: ``sketch``, ``probe``, ``dense`` or the reason of a retry."""
    new = [kind for kind in after if after[kind] != before.get(kind, 0)]
    assert len(new) == 1 and after[new[0]] == before.get(new[0], 0) + 1, f"from {before} to {after}"
    return new[0]


def integer_steps(key: object, numel: int, counts: list[int | list[int]], support: str = "random") -> list[list[Array]]:
    """Gradients of integers for every step: a number of nonzeros for all ranks, or one for each."""
    ranks = int(os.environ["HOROVOD_SIZE"])
    steps = []
    for number, nonzeros in enumerate(counts):
        each = nonzeros if isinstance(nonzeros, list) else [nonzeros] * ranks
        drawn = {n: draw_gradients((key, number), numel, n, ranks, support) for n in set(each)}
        steps.append([drawn[n][rank] for rank, n in enumerate(each)])
    return steps


def check_result(
    result: Array, gradients: list[Array], uncompressed: Array | None, happened: str, averaged: bool, dtype: str, what: str
) -> None:
    """A reduced gradient has the bits that it must have.

    With two ranks those of plain Horovod; with more, those of the exact sum (or average) rounded once. What was reduced
    dense is compared with plain Horovod always.

    Args:
        result: what came out.
        gradients: those of all ranks.
        uncompressed: what plain Horovod makes of them; None where it can't reduce the type.
        happened: as ``difference`` says.
        averaged: was the reduction an average?
        dtype: the format of the tensor.
        what: to say in an error.
    """
    ranks = len(gradients)
    if uncompressed is not None and (ranks == 2 or happened != "sketch" and dtype == "float32"):
        assert_same_bits(result, uncompressed, f"{what}, against plain Horovod")
    if ranks > 2 and happened == "sketch" or uncompressed is None:
        factor = Fraction(1, ranks) if averaged else Fraction(1)
        exact = exact_sum(gradients, factor, dtype).reshape(result.shape).astype(result.dtype)
        assert_same_bits(result, exact, f"{what}, against the exact sum")
