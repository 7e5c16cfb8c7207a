"""Arguments that can't be meant as they are given, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from harness import case
from misuse import (
    DIFFERENT_SIZES,
    check_different_sizes,
    check_wrong_options,
    check_wrong_values_of_compression,
    expect,
    sparse,
)

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


@case(2)
def different_shapes() -> None:
    """Ranks with tensors of different sizes, by hand and in an optimizer: an error that names shapes on every rank."""

    def by_hand(lhc: Any, array: Any, name: str) -> None:
        wire, context = lhc.compress(torch.from_numpy(array))
        lhc.decompress(hvd.allreduce(wire, name=name, op=hvd.Sum), context)

    def by_argument(lhc: Any, array: Any, name: str) -> None:
        hvd.allreduce(torch.from_numpy(array), name=name, compression=lhc)

    for call in (by_hand, by_argument):
        for *sizes, before in DIFFERENT_SIZES:
            lhc, name = LHC(), f"{call.__name__} {sizes} {before}"
            for _ in range(before):
                call(lhc, sparse(50_000), name)
            mine = sizes[hvd.rank()]
            check_different_sizes(hvd.rank(), mine, lambda array, call=call, lhc=lhc, name=name: call(lhc, array, name))
    for *sizes, _ in DIFFERENT_SIZES[::2]:
        mine = sizes[hvd.rank()]
        layer = torch.nn.Linear(mine, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.1), [(f"layer {sizes}", layer.weight)], compression=LHC()
        )

        def train(array: Any, layer: Any = layer, optimizer: Any = optimizer) -> None:
            layer(torch.from_numpy(array)).sum().backward()
            optimizer.step()

        check_different_sizes(hvd.rank(), mine, train)
