"""Several optimizers, one compressor: what one of them does or leaves undone must not disturb the others.

And what a compressor reads from its caller: factors that Horovod applies before a sum, names of parameters.
"""

from __future__ import annotations

import gc
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import assert_same_bits, draw_gradients
from harness import case
from steps import count, integer_steps
from torch_3_training import ROWS, STEPS, Model, Words, adam, assert_same_weights, digests, left_or_right, momentum, sgd
from torch_common import check_steps, plain, reduce, same_everywhere, weights_of

from hvd_lhc.torch import LHC

NUMEL = 50_000


def named(name: str, model: Model) -> list[tuple[str, torch.Tensor]]:
    """Parameters with names of their own."""
    return [(f"{name}.{parameter}", value) for parameter, value in model.named_parameters()]


def unused_in_turn(key: str, step: int, rank: int) -> Words:
    """The first model's tables are used by all ranks; of the second's, each rank leaves one out in most steps."""
    return {0: 3, 1: 2} if key == "first" else left_or_right(step, rank)


def train_two(name: str, compression: Any, interleaved: bool) -> dict[str, bytes]:
    """Two models with two tables of one shape each, and an optimizer each; all tables overflow in one step."""
    torch.manual_seed(1)
    models = {"first": Model(ROWS, ROWS), "second": Model(ROWS, ROWS)}
    makers = {"first": adam, "second": momentum}
    optimizers = {
        key: hvd.DistributedOptimizer(makers[key](model.parameters()), named(f"{name}.{key}", model), compression)
        for key, model in models.items()
    }
    for step in range(STEPS):
        for key, model in models.items():
            optimizers[key].zero_grad()
            loss = model.loss((key, step, hvd.rank()), unused_in_turn(key, step, hvd.rank()))
            (loss * (2.0**20 if step == 6 else 1.0)).backward()
            if not interleaved:
                optimizers[key].step()
        if interleaved:
            for key in ("second", "first") if step % 2 else ("first", "second"):
                optimizers[key].step()
    return {f"{key}.{parameter}": bits for key, model in models.items() for parameter, bits in weights_of(model).items()}


@case(2, 3, 4)
def optimizers_with_unused_parameters() -> None:
    """A parameter without gradient is compressed when its optimizer synchronizes, after the other's wires have come back."""
    for interleaved in (False, True):
        lhc, name = LHC(), f"owners {interleaved}"
        weights = train_two(name, lhc, interleaved)
        happened = count(lhc)
        assert happened["sketch"] >= 4 * 5 and happened["overflow"] >= 4, happened
        same_everywhere(digests(weights), name)
        same_everywhere(happened, f"{name}: statistics")
        if hvd.size() == 2:
            assert_same_weights(weights, train_two(f"{name} plain", hvd.Compression.none, interleaved), name)


@case(2, 3, 4)
def optimizer_dropped_after_backward() -> None:
    """Wires of an optimizer that is garbage, collected on some ranks and not on others, hold up nobody."""
    lhc = LHC()
    torch.manual_seed(1)
    model, other = Model(ROWS), Model(ROWS)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named("dropped", model), lhc)
    gc.disable()
    try:
        for step in range(3):
            optimizer.zero_grad()
            model.loss((step, hvd.rank()), {0: 3}).backward()
            if step < 2:
                optimizer.step()
        del optimizer
        if hvd.rank() == 1:
            gc.collect()
        successor = hvd.DistributedOptimizer(sgd(other.parameters()), named("successor", other), lhc)
        before = count(lhc)
        for step in range(6):
            successor.zero_grad()
            loss = other.loss((step, hvd.rank()), {0: 3 + step})
            (loss * (2.0**20 if step == 4 else 1.0)).backward()
            successor.step()
    finally:
        gc.enable()
    happened = {kind: number - before.get(kind, 0) for kind, number in count(lhc).items()}
    assert happened["probe"] == 1 and happened["sketch"] >= 2 and happened["overflow"] >= 1, happened
    same_everywhere(digests(weights_of(other)), "successor")
    same_everywhere(happened, "successor's statistics")
    gc.collect()


@case(2, 3, 4)
def prescaling_prevents_overflow() -> None:
    """Factors that Horovod applies before the sum are applied before it in a dense reduction too: no infinity.

    2 * 40000 is beyond float16, 2 * 2**127 beyond float32; halves of them are not.
    """
    for dtype, value in ((torch.float16, 40_000.0), (torch.float32, 2.0**127)):
        lhc, name = LHC(), f"prescaled {dtype}"
        halved = {"op": hvd.Sum, "prescale_factor": 1 / 4, "postscale_factor": 1.0}
        for step in range(4):
            gradients = [g % 128 for g in draw_gradients((name, step), NUMEL, 100, hvd.size())]
            if step in (0, 2, 3):
                for gradient in gradients:
                    gradient[7] = value
            if step == 2:
                gradients[0][8] = np.nan
            tensor = torch.from_numpy(gradients[hvd.rank()]).to(dtype)
            expected = plain(tensor, name, **halved)
            assert np.isfinite(expected[7])
            assert_same_bits(reduce(tensor, lhc, name, **halved), expected, f"{name}, step {step}")
            grouped = hvd.grouped_allreduce([tensor, tensor], compression=lhc, name=f"{name} group", **halved)
            for result in grouped:
                assert_same_bits(result.numpy(), expected, f"{name}, group, step {step}")
        assert lhc.statistics.probes and lhc.statistics.retries, lhc.statistics


@case(2, 3, 4)
def predivide_factor_prevents_overflow() -> None:
    """The same from an optimizer with gradient_predivide_factor, as for gradients near the end of float16."""
    bits = {}
    for compression in (LHC(), hvd.Compression.none):
        weight = torch.nn.Parameter(torch.zeros(NUMEL, dtype=torch.float16))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=2.0**-16),
            [(f"predivided {compression}", weight)],
            compression,
            gradient_predivide_factor=4.0,
        )
        for step in range(3):
            optimizer.zero_grad()
            (weight[: 50 + step] * 40_000).sum().backward()
            optimizer.step()
        assert torch.isfinite(weight).all() and weight[0] != 0, f"{compression}: {weight[:3]}"
        bits[isinstance(compression, LHC)] = weight.detach().numpy()
    if hvd.size() == 2:
        assert_same_bits(bits[True], bits[False], "predivided")


@case(2, 3, 4)
def reset_on_all_ranks() -> None:
    """After reset() a rank that has many steps behind it reduces together with one that has none."""
    lhc = LHC()
    check_steps("reset", integer_steps("reset", NUMEL, [100] * 4), lhc, hvd.Sum)
    before = lhc.statistics.sketches
    lhc.reset()
    fresh = lhc if hvd.rank() == 0 else LHC()
    happened = check_steps("reset", integer_steps("reset again", NUMEL, [200] * 3), fresh, hvd.Sum)
    assert happened == ["probe", "sketch", "sketch"], happened
    assert lhc.statistics.sketches == before + (2 if hvd.rank() == 0 else 0)


@case(2)
def initialized_anew() -> None:
    """After hvd.shutdown() and hvd.init(), as in an elastic job, ranks that were there before start afresh like newcomers."""
    lhc = LHC()
    check_steps("before", integer_steps("before", NUMEL, [100] * 4), lhc, hvd.Sum)
    hvd.shutdown()
    hvd.init()
    fresh = lhc if hvd.rank() == 0 else LHC()
    happened = check_steps("anew", integer_steps("anew", NUMEL, [200] * 3), fresh, hvd.Sum)
    assert happened == ["probe", "sketch", "sketch"], happened
