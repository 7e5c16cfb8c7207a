"""Arguments that can't be meant as they are given, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from harness import case
from misuse import check_wrong_options, check_wrong_values_of_compression, expect

from hvd_lhc.torch import LHC, Compression

NUMEL = 20_000


@case(2)
def wrong_options() -> None:
    """Options by position, unknown ones and wrong types raise ConfigError with what to write."""
    check_wrong_options(LHC)


@case(2)
def wrong_compressors_by_hand() -> None:
    """A class instead of an instance, or all of Compression, raises ConfigError out of hvd.allreduce."""
    check_wrong_values_of_compression(
        LHC, Compression, lambda what: hvd.allreduce(torch.ones(NUMEL), compression=what, name="wrong compressor")
    )


@case(2)
def wrong_compressors_of_an_optimizer() -> None:
    """The same out of the backward pass of a model with a DistributedOptimizer."""

    def train(what: Any) -> None:
        layer = torch.nn.Linear(200, 100)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters(), compression=what
        )
        layer(torch.ones(200)).sum().backward()
        optimizer.step()

    check_wrong_values_of_compression(LHC, Compression, train)


@case(2)
def arrays_of_others() -> None:
    """A NumPy array or a list is answered by how to make a tensor of it, whatever its size; the next tensor is reduced."""
    calls: list[Callable[[Any], Any]] = [
        LHC().compress,
        Compression.lhc.compress,
        lambda array: hvd.allreduce(array, compression=Compression.lhc, name="no tensor"),
    ]
    for call in calls:
        for array in (np.ones(NUMEL, np.float32), np.ones(3, np.float32), [1.0, 2.0]):
            expect(lambda call=call, array=array: call(array), "torch.Tensor", type(array).__name__, "torch.as_tensor")
    total = hvd.allreduce(torch.ones(NUMEL), compression=Compression.lhc, name="after no tensor", op=hvd.Sum)
    assert torch.equal(total, torch.full((NUMEL,), float(hvd.size())))
