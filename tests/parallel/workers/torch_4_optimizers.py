"""What else Horovod's optimizers do: sparse gradients, groups, join, predivide factors, several of them at once."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import assert_same_bits, draw_gradients, exact_sum
from harness import case
from steps import count, integer_steps
from torch_3_training import (
    ROWS,
    STEPS,
    Model,
    adam,
    assert_same_weights,
    assert_sketched,
    check_training,
    digests,
    left_or_right,
    momentum,
    sgd,
    train,
)
from torch_common import PAIR, check_steps, plain, reduce, same_everywhere, weights_of

from hvd_lhc.torch import LHC, Compression

NUMEL = 50_000


@case(2, 3, 4)
def sparse_gradients() -> None:
    """Sparse gradients are gathered by Horovod as without compression, or compressed with sparse_as_dense=True."""
    happened = check_training("gathered", LHC(), lambda: Model(ROWS, sparse=True))
    assert happened == {"sketch": 0, "probe": 0, "dense": 2 * STEPS}, happened
    happened = check_training("as dense", LHC(), lambda: Model(ROWS, sparse=True), sparse_as_dense=True)
    assert_sketched(happened, tables=1, dense=2)
    options = {"sparse_as_dense": True, "backward_passes_per_step": 2}
    assert_sketched(check_training("as dense, twice", LHC(), lambda: Model(ROWS, sparse=True), **options), tables=1, dense=2)


@case(2, 3, 4)
def optimizer_with_groups() -> None:
    """Groups by number, and by hand: sketches and dense tensors in one group, and two sketches in one."""

    def both_tables(step: int, rank: int) -> dict[int, int]:
        return {0: 3, 1: 2}

    def by_number(model: Model) -> int:
        return 2

    def all_in_one(model: Model) -> list[list[torch.Tensor]]:
        return [list(model.parameters())]

    def tables_apart(model: Model) -> list[list[torch.Tensor]]:
        return [[table.weight for table in model.tables], [model.head.bias]]

    for groups, more in ((by_number, 0), (all_in_one, 500), (tables_apart, 0)):
        happened = check_training(
            groups.__name__,
            LHC(),
            lambda more=more: Model(ROWS, ROWS + more),
            words=both_tables,
            groups=groups,
            optimizer=adam,
            scale=lambda step: 2.0**20 if step == 6 else 1.0,
        )
        assert happened["overflow"] == 2, happened
        assert_sketched(happened, tables=2, dense=2, refused=3)


@case(2, 3, 4)
def grouped_allreduce_by_hand() -> None:
    """hvd.grouped_allreduce of large, small and float64 tensors, with a retry of two of them in one step."""
    lhc = LHC()
    sizes = (NUMEL, 100, NUMEL, 2 * NUMEL)
    for step in range(6):
        everything = [draw_gradients((i, step), numel, 50, hvd.size()) for i, numel in enumerate(sizes)]
        if step == 3:
            everything[0][0][5] = everything[3][1][7] = np.nan
        tensors = [torch.from_numpy(gradients[hvd.rank()].copy()) for gradients in everything]
        tensors.append(torch.full((7,), 1e-300, dtype=torch.float64))
        results = hvd.grouped_allreduce(tensors, compression=lhc, name="by hand", op=hvd.Sum)
        assert len(results) == len(tensors)
        for i, gradients in enumerate(everything):
            assert_same_bits(results[i].numpy(), np.sum(gradients, axis=0), f"tensor {i}, step {step}")
        assert_same_bits(results[4].numpy(), np.full(7, 1e-300) * hvd.size(), f"float64, step {step}")
    assert count(lhc) == {"sketch": 13, "probe": 3, "dense": 6, "nonfinite": 2}, lhc.statistics


def steps_of_rank(rank: int) -> int:
    """Rank 0 has most data; the last rank joins first."""
    return 10 - 3 * rank


@case(2, 3, 4)
def ranks_that_have_joined() -> None:
    """Ranks that run out of data join; the others go on compressing, with retries, and zeros are added for the joined."""
    for op, factor in ((hvd.Sum, Fraction(1)), (hvd.Average, Fraction(1, hvd.size()))):
        lhc, name = LHC(), f"joined {op}"
        steps = [draw_gradients((name, step), NUMEL, 100, hvd.size()) for step in range(steps_of_rank(0))]
        steps[8][0][3] = np.inf
        results, plains = [], []
        for step in range(steps_of_rank(hvd.rank())):
            gradient = steps[step][hvd.rank()]
            results.append(reduce(gradient, lhc, name, op=op))
            plains.append(plain(gradient, name, op=op))
        assert hvd.join() == 0
        for step, (result, uncompressed) in enumerate(zip(results, plains, strict=True)):
            there = [gradient for rank, gradient in enumerate(steps[step]) if step < steps_of_rank(rank)]
            what = f"{name}, step {step}, {len(there)} ranks"
            if hvd.size() > 2 and op == hvd.Average and step not in (0, 8):  # plain Horovod rounds twice
                assert_same_bits(result, exact_sum(there, factor), what)
            else:
                assert_same_bits(result, uncompressed, what)
        refused = {"nonfinite": 1} if hvd.rank() == 0 else {}
        assert lhc.statistics.refusals == refused, lhc.statistics
        assert lhc.statistics.sketches == steps_of_rank(hvd.rank()) - 1 - len(refused), lhc.statistics


@case(2, 3, 4)
def training_with_uneven_data() -> None:
    """A rank that goes on training after others have joined has, at two ranks, the weights of plain Horovod."""

    def train_and_join(name: str, compression: Any) -> dict[str, bytes]:
        weights = train(name, compression, optimizer=momentum, steps=steps_of_rank(hvd.rank()))
        hvd.join()
        return weights

    lhc = LHC()
    weights = train_and_join("uneven", lhc)
    assert lhc.statistics.sketches >= steps_of_rank(hvd.rank()) - 2, lhc.statistics
    uncompressed = train_and_join("uneven plain", hvd.Compression.none)
    if hvd.size() == 2:
        assert_same_weights(weights, uncompressed, "uneven data, with and without compression")


@case(2, 3, 4)
def epoch_after_a_join() -> None:
    """After a join all ranks reduce together again, although the joined ones missed what the others learned."""
    lhc = LHC()
    first = integer_steps("first epoch", NUMEL, [100] * 4)
    alone = integer_steps("alone", NUMEL, [1500] * 4)
    second = integer_steps("second epoch", NUMEL, [100] * 6)
    check_steps("epoch", first, lhc, hvd.Sum)
    if hvd.rank() == 0:
        for gradients in alone:
            result = reduce(gradients[0], lhc, "epoch", op=hvd.Sum)
            assert_same_bits(result, gradients[0], "alone")
    hvd.join()
    happened = check_steps("epoch", second, lhc, hvd.Sum)
    assert happened[-1] == "sketch", happened


@case(2, 3, 4)
def copied_and_pickled() -> None:
    """A copy of a compressor has its settings, and starts afresh: it reduces, and the original goes on undisturbed."""
    original = LHC(min_numel=NUMEL, max_wire_ratio=0.25, reprobe_steps=3)
    steps = integer_steps("copied", NUMEL, [100] * 5)
    check_steps("original", steps[:2], original, hvd.Sum)
    for how, other in {
        "copy": copy.copy(original),
        "deepcopy": copy.deepcopy(original),
        "pickle": pickle.loads(pickle.dumps(original)),
    }.items():
        assert repr(other) == repr(original) and other is not original, how
        assert other.statistics.wire_bytes == 0, f"{how}: {other.statistics}"
        happened = check_steps(how, steps[:3], other, hvd.Average)
        assert happened == ["probe", "sketch", "sketch"], f"{how}: {happened}"
    assert original.statistics.sketches == 1
    assert check_steps("original", steps[2:], original, hvd.Sum) == ["sketch"] * 3


@case(3)
def copied_with_process_set() -> None:
    """Copies keep the process set."""
    if not PAIR.included():
        return
    for how, other in {
        "deepcopy": copy.deepcopy(LHC(process_set=PAIR)),
        "pickle": pickle.loads(pickle.dumps(LHC(process_set=PAIR))),
    }.items():
        steps = [draw_gradients((how, step), NUMEL, 100, 2) for step in range(4)]
        steps[2][1][0] = np.nan
        happened = check_steps(f"pair {how}", steps, other, hvd.Sum, PAIR)
        assert happened == ["probe", "sketch", "nonfinite", "sketch"], f"{how}: {happened}"


@case(2, 3, 4)
def gradient_predivide_factor() -> None:
    """gradient_predivide_factor=2: the weights of plain Horovod at two ranks."""
    happened = check_training("predivided", LHC(), gradient_predivide_factor=2.0, optimizer=adam)
    assert_sketched(happened, tables=1, dense=2)


@case(2, 3, 4)
def optimizer_with_sum() -> None:
    """op=Sum: the weights of plain Horovod at two ranks."""
    happened = check_training("sum", LHC(), lambda: Model(ROWS, ROWS), words=left_or_right, optimizer=adam, op=hvd.Sum)
    assert_sketched(happened, tables=2, dense=2)


def train_adversaries(name: str, compression: Any, interleaved: bool) -> dict[str, bytes]:
    """Two models with tables of one shape and an optimizer each, which share a compressor."""
    torch.manual_seed(1)
    models = {"first": Model(ROWS), "second": Model(ROWS)}
    optimizers = {}
    for key, model in models.items():
        named = [(f"{name}.{key}.{parameter}", value) for parameter, value in model.named_parameters()]
        make = adam if key == "first" else sgd
        optimizers[key] = hvd.DistributedOptimizer(make(model.parameters()), named, compression)
    for step in range(STEPS):
        for key, model in models.items():
            optimizers[key].zero_grad()
            model.loss((key, step, hvd.rank()), {0: 3}).backward()
            if not interleaved:
                optimizers[key].step()
        if interleaved:
            for key in ("second", "first") if step % 2 else ("first", "second"):
                optimizers[key].step()
    return {f"{key}.{name}": bits for key, model in models.items() for name, bits in weights_of(model).items()}


@case(2, 3, 4)
def densities_that_alternate() -> None:
    """Steps of two densities in turn, as from two optimizers with tables of one shape: the capacity fits the denser."""
    lhc = LHC()
    happened = check_steps("alternating", integer_steps("alternating", NUMEL, [300, 100] * 6), lhc, hvd.Sum)
    assert happened.count("dense") == 0 and lhc.statistics.retries <= 2, happened


@case(2, 3, 4)
def optimizers_that_share_a_compressor() -> None:
    """Two optimizers with Compression.lhc, one after the other in a step or interleaved: plain Horovod's weights."""
    for interleaved in (False, True):
        name = f"adversaries {interleaved}"
        before = count(Compression.lhc)
        weights = train_adversaries(name, Compression.lhc, interleaved)
        happened = {kind: number - before.get(kind, 0) for kind, number in count(Compression.lhc).items()}
        assert happened["sketch"] >= 2 * STEPS - 4, happened
        same_everywhere(digests(weights), name)
        if hvd.size() == 2:
            uncompressed = train_adversaries(f"{name} plain", hvd.Compression.none, interleaved)
            assert_same_weights(weights, uncompressed, name)
