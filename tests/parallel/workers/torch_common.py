"""What the torch cases share: starting, meeting, reducing with and without compression."""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import Array, assert_same_bits, exact_sum

from hvd_lhc.torch import LHC

#: Ranks 0 and 2, known to Horovod where there are three ranks.
PAIR = hvd.ProcessSet([0, 2])


def start() -> int:
    """Initialize Horovod; returns the rank."""
    torch.set_num_threads(1)
    three = os.environ.get("HOROVOD_SIZE") == "3"
    hvd.init(process_sets=[PAIR] if three else None)
    return int(hvd.rank())


def meet(name: str) -> None:
    """Wait for all ranks."""
    hvd.allreduce(torch.zeros(1), name=f"meet {name}", op=hvd.Sum)


def reduce(gradient: Array | torch.Tensor, compressor: Any, name: str, **options: Any) -> Array:
    """The reduced gradient, float32 or of the gradient's type where NumPy has it."""
    tensor = gradient if isinstance(gradient, torch.Tensor) else torch.from_numpy(gradient.copy())
    before = tensor.clone()
    result = hvd.allreduce(tensor, compression=compressor, name=name, **options)
    assert result.dtype == tensor.dtype and result.shape == tensor.shape, f"{name}: {result.dtype} {result.shape}"
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)), f"{name}: the input was modified"
    array: Array = (result.float() if result.dtype == torch.bfloat16 else result).numpy()
    return array


def plain(gradient: Array | torch.Tensor, name: str, **options: Any) -> Array:
    """The same without compression."""
    return reduce(gradient, hvd.Compression.none, f"{name} plain", **options)


def check_steps(
    name: str,
    steps: list[list[Array]],
    lhc: LHC,
    op: Any,
    ranks: Any = None,
    prepare: Callable[[Array], Any] = torch.from_numpy,
    dtype: str = "float32",
) -> list[str]:
    """Reduce one gradient per step and check every result; returns what happened in each step.

    With two ranks a result must have the bits of plain Horovod's; with more, those of the exact sum (or average) rounded
    once. Steps that were reduced dense are compared with plain Horovod always.

    Args:
        name: of the tensor.
        steps: for every step the gradients of all ranks.
        lhc: the compressor.
        op: ``hvd.Sum`` or ``hvd.Average``.
        ranks: a process set, of which this rank is one.
        prepare: makes a tensor of this rank's gradient.
        dtype: the format that the tensor has.
    """
    ranks = hvd.global_process_set if ranks is None else ranks
    factor = Fraction(1, ranks.size()) if op == hvd.Average else Fraction(1)
    happened = []
    for number, gradients in enumerate(steps):
        what = f"{name}, step {number}"
        tensor = prepare(gradients[ranks.rank()].copy())
        before = count(lhc)
        result = reduce(tensor, lhc, name, op=op, process_set=ranks)
        happened.append(difference(before, count(lhc)))
        assert result.dtype == np.float32 or dtype == "float16", what
        if ranks.size() == 2 and dtype != "bfloat16" or happened[-1] != "sketch" and dtype == "float32":
            assert_same_bits(result, plain(tensor, name, op=op, process_set=ranks), f"{what}, against plain Horovod")
        if ranks.size() > 2 and happened[-1] == "sketch" or dtype == "bfloat16":
            exact = exact_sum(gradients, factor, dtype).reshape(result.shape).astype(result.dtype)
            assert_same_bits(result, exact, f"{what}, against the exact sum")
    return happened


def count(lhc: LHC) -> dict[str, int]:
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
    from exact import draw_gradients

    steps = []
    for number, nonzeros in enumerate(counts):
        each = nonzeros if isinstance(nonzeros, list) else [nonzeros] * hvd.size()
        drawn = {n: draw_gradients((key, number), numel, n, hvd.size(), support) for n in set(each)}
        steps.append([drawn[n][rank] for rank, n in enumerate(each)])
    return steps


def same_everywhere(value: Any, name: str) -> None:
    """All ranks hold the same value."""
    values = hvd.allgather_object(value, name=name)
    assert all(other == values[0] for other in values), f"{name} differs between ranks: {values}"


def weights_of(module: torch.nn.Module) -> dict[str, bytes]:
    """The bits of a module's parameters."""
    return {name: parameter.detach().float().numpy().tobytes() for name, parameter in module.named_parameters()}
