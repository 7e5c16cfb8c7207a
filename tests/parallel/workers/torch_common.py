"""What the torch cases share: starting, meeting, reducing with and without compression."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import Array
from steps import check_result, count, difference

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
    now, then = (one.detach().contiguous().view(-1).view(torch.uint8) for one in (tensor, before))
    assert torch.equal(now, then), f"{name}: the input was modified"
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
    happened = []
    for number, gradients in enumerate(steps):
        what = f"{name}, step {number}"
        tensor = prepare(gradients[ranks.rank()].copy())
        before = count(lhc)
        result = reduce(tensor, lhc, name, op=op, process_set=ranks)
        happened.append(difference(before, count(lhc)))
        assert result.dtype == np.float32 or dtype == "float16", what
        uncompressed = plain(tensor, name, op=op, process_set=ranks) if dtype != "bfloat16" else None
        check_result(result, gradients, uncompressed, happened[-1], op == hvd.Average, dtype, what)
    return happened


def same_everywhere(value: Any, name: str) -> None:
    """All ranks hold the same value."""
    values = hvd.allgather_object(value, name=name)
    assert all(other == values[0] for other in values), f"{name} differs between ranks: {values}"


def weights_of(module: torch.nn.Module) -> dict[str, bytes]:
    """The bits of a module's parameters."""
    return {name: parameter.detach().float().numpy().tobytes() for name, parameter in module.named_parameters()}
