"""Everything at once, at random: densities, planted values, the order in which ranks come to their tensors, joins."""

from __future__ import annotations

import random

import horovod.torch as hvd
import numpy as np
import torch
from exact import Array, assert_same_bits, generator
from harness import case

from hvd_lhc.torch import LHC

#: Two pairs of one shape, a table's rows, and a tensor that is too small to be compressed.
SHAPES = [(20_000,), (20_000,), (300, 64), (300, 64), (25_000,), (100,)]
STEPS = 40


def draw_step(seed: int, step: int, shared: random.Random) -> list[list[Array]]:
    """For every tensor the gradients of all ranks: integers, whose sums are exact, here and there NaN or a large one."""
    everything = []
    dense = shared.random() < 0.2
    for number, shape in enumerate(SHAPES):
        numel = int(np.prod(shape))
        count = numel if dense else max(1, int(numel * shared.choice([0.001, 0.01, 0.1, 1.0])))
        planted = shared.choice([np.nan, 2.0**20]) if shared.random() < 0.1 else None
        gradients = []
        for rank in range(hvd.size()):
            rng = generator("chaos", seed, step, number, rank)
            gradient = np.zeros(numel, np.float32)
            gradient[rng.choice(numel, count, replace=False)] = rng.integers(-50, 50, count)
            if planted is not None and rank == 0:
                gradient[rng.integers(numel)] = planted
            gradients.append(gradient.reshape(shape))
        everything.append(gradients)
    return everything


def reduce_step(lhc: LHC, everything: list[list[Array]], own: random.Random, what: str) -> None:
    """Compress in one order and collect in another, both this rank's own, and check every sum."""
    order = list(range(len(SHAPES)))
    own.shuffle(order)
    pending = {}
    for number in order:
        wire, context = lhc.compress(torch.from_numpy(everything[number][hvd.rank()].copy()))
        pending[number] = hvd.allreduce_async_(wire, name=f"chaos.{number}", op=hvd.Sum), context
    own.shuffle(order)
    for number in order:
        handle, context = pending[number]
        result = lhc.decompress(hvd.synchronize(handle), context).numpy()
        assert_same_bits(result, np.sum(everything[number], axis=0, dtype=np.float32), f"{what}, tensor {number}")


def reduce_before_a_join(lhc: LHC, shared: random.Random, what: str) -> None:
    """The first ranks have some more steps; then all join, and go on together."""
    last, counts = shared.randrange(hvd.size()), [shared.choice([5, 3000, 20_000]) for _ in range(3)]
    for count in counts if hvd.rank() <= last else []:
        gradient = torch.zeros(20_000)
        gradient[:count] = 1
        result = hvd.allreduce(gradient, compression=lhc, name="chaos alone", op=hvd.Sum)
        assert torch.equal(result, gradient * (last + 1)), f"{what}, before a join, {count} nonzeros"
    hvd.join()


@case(2, 3, 4)
def chaos() -> None:
    """Whatever happens, every sum is exact on every rank, nobody waits in vain, and plans stay the same."""
    for seed in (1, 2):
        shared, own = random.Random(seed), random.Random(f"{seed} {hvd.rank()}")
        lhc = LHC(reprobe_steps=3)
        for step in range(STEPS):
            what = f"seed {seed}, step {step}"
            reduce_step(lhc, draw_step(seed, step, shared), own, what)
            if shared.random() < 0.1:
                reduce_before_a_join(lhc, shared, what)
        assert lhc.statistics.sketches and lhc.statistics.probes and lhc.statistics.retries, lhc.statistics
