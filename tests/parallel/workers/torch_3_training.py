"""Training through ``hvd.DistributedOptimizer``: what compression must not change.

Models sum rows of tables and put a linear layer on top. A batch touches few rows, so that gradients of tables are
sketched and those of the layer stay dense.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import Array, assert_same_bits, exact_sum, generator
from harness import case
from steps import count
from torch_common import same_everywhere, weights_of

from hvd_lhc.torch import LHC

ROWS, ROW = 8000, 16
SAMPLES = 8
STEPS = 12
#: What a step draws on a rank: for every table that is used, how many words a sample has.
Words = dict[int, int]


class Model(torch.nn.Module):
    """Tables of words and a linear layer on the sum of the rows of a sample's words."""

    def __init__(self, *rows: int, sparse: bool = False) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(count, ROW, sparse=sparse) for count in rows)
        self.head = torch.nn.Linear(ROW, 1)

    def loss(self, key: object, words: Words) -> torch.Tensor:
        """The squared error on samples drawn from a key."""
        random = generator("training", key)
        total = torch.zeros(SAMPLES, ROW, dtype=self.head.weight.dtype)
        for i, number in words.items():
            table = self.tables[i]
            drawn = random.integers(0, table.num_embeddings, (SAMPLES, number))
            total = total + table(torch.from_numpy(drawn)).mean(1)
        target = torch.from_numpy(random.normal(size=(SAMPLES, 1))).to(total.dtype)
        return (self.head(total) - target).square().mean()


def one_table() -> Model:
    """The model of most cases."""
    return Model(ROWS)


def three_words(step: int, rank: int) -> Words:
    """Few words of the one table, in every step on every rank."""
    return {0: 3}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain SGD: weights show the gradients as they are."""
    return torch.optim.SGD(parameters, lr=0.5)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD that changes rows in steps without a gradient, too."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam, which makes the smallest elements count as much as the largest."""
    return torch.optim.Adam(parameters, lr=0.01)


def train(
    name: str,
    compression: Any,
    build: Callable[[], Model] = one_table,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    words: Callable[[int, int], Words] = three_words,
    steps: int = STEPS,
    groups: Callable[[Model], Any] = lambda model: None,
    scale: Callable[[int], float] = lambda step: 1.0,
    finish: Callable[[Any, Model], None] = lambda distributed, model: distributed.step(),
    **options: Any,
) -> dict[str, bytes]:
    """Train a model and return the bits of its weights.

    Args:
        name: of the tensors, with those of the parameters behind it.
        compression: as for Horovod.
        build: makes the model, the same on all ranks.
        optimizer: makes the optimizer that Horovod wraps.
        words: for a step and a rank, what it draws.
        steps: how many.
        groups: the groups for Horovod, from the model.
        scale: for a step, a factor of the loss.
        finish: what follows the backward passes.
        options: further options of ``DistributedOptimizer``.
    """
    torch.manual_seed(1)
    model = build()
    named = [(f"{name}.{parameter}", value) for parameter, value in model.named_parameters()]
    distributed = hvd.DistributedOptimizer(optimizer(model.parameters()), named, compression, groups=groups(model), **options)
    for step in range(steps):
        distributed.zero_grad()
        for number in range(options.get("backward_passes_per_step", 1)):
            loss = model.loss((step, number, hvd.rank()), words(step, hvd.rank()))
            (loss * scale(step)).backward()
        finish(distributed, model)
    return weights_of(model)


def initial_weights(build: Callable[[], Model]) -> dict[str, bytes]:
    """The bits of the weights that training starts from."""
    torch.manual_seed(1)
    return weights_of(build())


def digests(weights: dict[str, bytes]) -> dict[str, str]:
    """Short stand-ins for weights, to compare between ranks."""
    return {name: hashlib.sha256(bits).hexdigest() for name, bits in weights.items()}


def assert_same_weights(actual: dict[str, bytes], expected: dict[str, bytes], what: str) -> None:
    """Equal in every bit."""
    different = [name for name in expected if actual[name] != expected[name]]
    assert actual.keys() == expected.keys() and not different, f"{what}: {different} differ"


def check_training(name: str, lhc: LHC, build: Callable[[], Model] = one_table, **options: Any) -> dict[str, int]:
    """Train with compression; returns how many tensors went which way.

    Weights and counts are the same on all ranks; with two ranks, weights have the bits of training without compression.
    """
    before = count(lhc)
    weights = train(name, lhc, build, **options)
    happened = {kind: number - before.get(kind, 0) for kind, number in count(lhc).items()}
    start = initial_weights(build)
    unchanged = [parameter for parameter in start if start[parameter] == weights[parameter]]
    assert not unchanged, f"{name}: training left {unchanged} as they were"
    same_everywhere(digests(weights), f"{name}: weights")
    same_everywhere(happened, f"{name}: statistics")
    if hvd.size() == 2:
        plain = train(f"{name} plain", hvd.Compression.none, build, **options)
        assert_same_weights(weights, plain, f"{name}, with and without compression")
    return happened


def retries(happened: dict[str, int]) -> int:
    """How many sketches were refused."""
    return sum(number for kind, number in happened.items() if kind not in ("sketch", "probe", "dense"))


def assert_sketched(happened: dict[str, int], tables: int, dense: int, steps: int = STEPS, refused: int = 1) -> None:
    """All tables were sketched in all steps but the first, but for a few that were refused; the rest went dense."""
    assert happened["probe"] == tables and happened["dense"] == dense * steps, happened
    assert happened["sketch"] + retries(happened) == tables * (steps - 1), happened
    assert retries(happened) <= refused * tables, happened


@case(2, 3, 4)
def training_with_sgd() -> None:
    """SGD: the weights of plain Horovod at two ranks, and the same on all ranks at three."""
    assert_sketched(check_training("sgd", LHC(), steps=20), tables=1, dense=2, steps=20)


@case(2, 3, 4)
def training_with_adam() -> None:
    """Adam, which divides by the size of a gradient, ends in the same weights too; so does SGD with momentum."""
    for optimizer in (adam, momentum):
        happened = check_training(optimizer.__name__, LHC(), optimizer=optimizer, steps=20)
        assert_sketched(happened, tables=1, dense=2, steps=20)


@case(2, 3, 4)
def gradients_of_every_step() -> None:
    """The gradient of a table is, in every step, the exact average of the ranks' gradients, rounded once."""
    check_gradients("float32")


def check_gradients(dtype: str) -> None:
    """Train a model of some type, and compare the table's gradients with those that all ranks' data give here."""
    torch.manual_seed(1)
    model = one_table().to(getattr(torch, dtype))
    named = [(f"gradients {dtype}.{name}", value) for name, value in model.named_parameters()]
    lhc = LHC()
    distributed = hvd.DistributedOptimizer(sgd(model.parameters()), named, lhc)
    sketches = 0
    for step in range(6):
        expected = exact_sum(gradients_of_ranks(model, step), Fraction(1, hvd.size()), dtype)
        distributed.zero_grad()
        model.loss((step, hvd.rank()), three_words(step, hvd.rank())).backward()
        distributed.synchronize()
        gradient = model.tables[0].weight.grad
        assert gradient.dtype == getattr(torch, dtype)
        if lhc.statistics.sketches > sketches:  # plain Horovod rounds more often at three ranks
            assert_same_bits(gradient.float().numpy(), expected, f"{dtype}, step {step}")
        sketches = lhc.statistics.sketches
        with distributed.skip_synchronize():
            distributed.step()
    assert sketches >= 4, lhc.statistics
    same_everywhere(digests(weights_of(model)), f"gradients {dtype}: weights")


def gradients_of_ranks(model: Model, step: int) -> list[Array]:
    """The table's gradient for the data of every rank, as float32."""
    gradients = []
    for rank in range(hvd.size()):
        local = copy.deepcopy(model)
        local.zero_grad()
        local.loss((step, rank), three_words(step, rank)).backward()
        gradients.append(local.tables[0].weight.grad.float().numpy())
    return gradients


@case(2, 3, 4)
def training_in_bfloat16() -> None:
    """A bfloat16 model trains: same weights on all ranks, the table's gradients rounded once to bfloat16."""
    check_gradients("bfloat16")


@case(2, 3, 4)
def training_in_float16() -> None:
    """A float16 model: gradients rounded once to float16, and the weights of plain Horovod at two ranks."""
    check_gradients("float16")
    assert_sketched(check_training("float16", LHC(), build=lambda: one_table().half()), tables=1, dense=2)


def left_or_right(step: int, rank: int) -> Words:
    """Both tables, or one, or the other: ranks differ in most steps."""
    return [{0: 3}, {1: 3}, {0: 3, 1: 2}, {1: 2, 0: 3}][(step + rank * (1 + step // 4)) % 4]


@case(2, 3, 4)
def parameters_without_gradient() -> None:
    """Tables that some ranks don't use in some steps, of one shape or of two; once, all of them overflow their plan.

    Horovod sends zeros for them, after all others: ranks come to the retries in different order.
    """
    for rows in ((ROWS, ROWS), (ROWS, ROWS + 500)):
        happened = check_training(
            f"left or right {rows}",
            LHC(),
            lambda rows=rows: Model(*rows),
            words=left_or_right,
            optimizer=adam,
            scale=lambda step: 2.0**20 if step == 6 else 1.0,
        )
        assert happened["overflow"] == 2, happened
        assert_sketched(happened, tables=2, dense=2, refused=3)


@case(2, 3, 4)
def unused_for_all_ranks() -> None:
    """A table that no rank uses for several steps, and others after that: zeros are sketched, and rows come back."""
    happened = check_training(
        "unused",
        LHC(),
        lambda: Model(ROWS, ROWS + 1),
        words=lambda step, rank: {0: 3} if step % 6 < 3 else {1: 3},
        optimizer=momentum,
    )
    assert_sketched(happened, tables=2, dense=2, refused=2)


@case(2, 3, 4)
def same_shape_different_density() -> None:
    """Two tables of a shape, one with ten times as many rows in a step as the other: both are sketched."""
    happened = check_training("sparse and denser", LHC(), lambda: Model(ROWS, ROWS), words=lambda step, rank: {0: 1, 1: 10})
    assert_sketched(happened, tables=2, dense=2)


class WithDenseLayer(Model):
    """A table, and a layer whose weight has the table's shape and a dense gradient."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.wide = torch.nn.Linear(ROW, ROWS)

    def loss(self, key: object, words: Words) -> torch.Tensor:
        """The error, and the size of what the wide layer makes of the head's weight."""
        return super().loss(key, words) + self.wide(self.head.weight).square().mean()


@case(2, 3, 4)
def same_shape_one_dense() -> None:
    """A table that shares its shape with a dense weight has a plan of its own, with groups and without."""
    for groups in (lambda model: None, lambda model: [list(model.parameters())]):
        happened = check_training("sparse and dense", LHC(), WithDenseLayer, groups=groups)
        assert happened["probe"] == 3 and happened["dense"] == 4 * STEPS - 2, happened  # the dense one, again after 8 steps
        assert happened["sketch"] + retries(happened) == STEPS - 1 and retries(happened) <= 1, happened


@case(2, 3, 4)
def several_backward_passes() -> None:
    """backward_passes_per_step of 2 and 4: gradients are summed on each rank, then reduced once."""
    for passes in (2, 4):
        happened = check_training(f"{passes} passes", LHC(), backward_passes_per_step=passes, optimizer=adam)
        assert_sketched(happened, tables=1, dense=2)


@case(2, 3, 4)
def fewer_passes_than_announced() -> None:
    """A step that comes before the last backward pass reduces what there is."""

    def one_pass_more(distributed: Any, model: Model) -> None:
        distributed.step()
        distributed.zero_grad()
        model.loss(("more", hvd.rank()), {0: 6}).backward()
        distributed.step()

    happened = check_training("one pass", LHC(), backward_passes_per_step=2, finish=one_pass_more)
    assert_sketched(happened, tables=1, dense=2, steps=2 * STEPS)


@case(2, 3, 4)
def clipping_and_kept_gradients() -> None:
    """Gradients can be clipped between synchronize and step, and zeroed in place after it: no buffer is used twice."""
    kept: list[tuple[torch.Tensor, Array]] = []

    def clip(distributed: Any, model: Model) -> None:
        distributed.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for table in model.tables:
            kept.append((table.weight.grad, table.weight.grad.numpy().copy()))
        with distributed.skip_synchronize():
            distributed.step()

    happened = check_training("clipped", LHC(), lambda: Model(ROWS, ROWS), words=lambda step, rank: {0: 3, 1: 2}, finish=clip)
    assert_sketched(happened, tables=2, dense=2)
    for tensor, expected in kept:
        assert np.array_equal(tensor.numpy(), expected), "a gradient of an earlier step has changed"

    def zero_in_place(distributed: Any, model: Model) -> None:
        distributed.step()
        model.zero_grad(set_to_none=False)
        model.loss(("in place", hvd.rank()), {0: 3}).backward()
        distributed.step()

    assert_sketched(check_training("in place", LHC(), finish=zero_in_place), tables=1, dense=2, steps=2 * STEPS)
