"""Gradients of many steps and several ranks, for ``planner.py``: of the examples' models, and made up.

A history is an iterator over steps; a step maps names of tensors to the gradients of all ranks. The models are trained
as their examples do it, in one process that plays all ranks in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HISTORIES", "Step"]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

Array = NDArray[np.float32]
#: name of a tensor -> its gradient on every rank
Step = dict[str, list[Array]]


def ncf(ranks: int, seed: int) -> Iterator[Step]:
    """The gradients of ``examples/pytorch_ncf.py`` with its default settings."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    from movielens import MovieLens, fetch
    from pytorch_ncf import NeuMF, local_gradients

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = MovieLens.load(fetch(), seed)
    model = NeuMF(data.users, data.items, factors=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in count():
        sources = [data.batches(16, 4, seed=seed, epoch=epoch, rank=rank, size=ranks) for rank in range(ranks)]
        for batches in zip(*sources, strict=True):
            gradients = [local_gradients(model, batch) for batch in batches]
            yield {
                name: [gradient[i].numpy() for gradient in gradients]
                for i, (name, _) in enumerate(model.named_parameters())
            }
            for i, parameter in enumerate(model.parameters()):
                parameter.grad = torch.stack([gradient[i] for gradient in gradients]).mean(0)
            optimizer.step()


def text(ranks: int, seed: int) -> Iterator[Step]:
    """The gradients of ``examples/tensorflow2_text.py`` with its default settings."""
    sys.path.insert(0, str(EXAMPLES))
    import tensorflow as tf
    from tensorflow2_text import Adam, NextWord, Text

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.random.set_seed(seed)
    words = Text.load(20)
    model = NextWord(words.vocabulary, 128, 64, seed)
    variables = model.trainable_variables
    optimizer = Adam(variables, 2e-3)

    @tf.function
    def local_gradients(windows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.training_loss(windows)
        return [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]

    apply = tf.function(lambda gradients: optimizer.apply(gradients, variables))
    for epoch in count():
        sources = [words.batches(8, seed=seed, epoch=epoch, rank=rank, size=ranks) for rank in range(ranks)]
        for batches in zip(*sources, strict=True):
            gradients = [local_gradients(batch) for batch in batches]
            yield {v.name: [gradient[i].numpy() for gradient in gradients] for i, v in enumerate(variables)}
            apply([tf.add_n([gradient[i] for gradient in gradients]) / ranks for i in range(len(variables))])


def embedding_bag(ranks: int, seed: int) -> Iterator[Step]:
    """The table of a bag of words (390,625 rows of 64) in training: 1,024 bags of 4 on each rank, drawn by Zipf's law (1.05)."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    rows, row, rate = 390_625, 64, 0.003
    shares = np.arange(1, rows + 1) ** -1.05
    cumulated = np.cumsum(shares / shares.sum())
    table = torch.randn(rows, row, requires_grad=True)
    score = torch.nn.Linear(row, 1)
    optimizer = torch.optim.SGD(score.parameters(), lr=rate)
    truth = torch.randn(rows)
    gradients = [np.zeros((rows, row), np.float32) for _ in range(ranks)]
    while True:
        touched = []
        optimizer.zero_grad()
        for gradient in gradients:
            words = torch.from_numpy(np.searchsorted(cumulated, random.random((1024, 4))).clip(max=rows - 1))
            bags = torch.nn.functional.embedding_bag(words, table, mode="sum", sparse=True)
            (torch.nn.functional.mse_loss(score(bags).squeeze(1), truth[words].sum(1)) / ranks).backward()
            sparse = table.grad.coalesce()
            table.grad = None
            touched.append(sparse.indices()[0].numpy())
            gradient[touched[-1]] = sparse.values().numpy()
        yield {"table": gradients}
        optimizer.step()
        for gradient, drawn in zip(gradients, touched, strict=True):
            table.data[drawn] -= torch.from_numpy(rate * gradient[drawn])
            gradient[drawn] = 0


def zipf_rows(ranks: int, seed: int) -> Iterator[Step]:
    """A table of 20,000 rows of 32, of which each rank draws 300 words by Zipf's law (exponent 1.1)."""
    random = np.random.default_rng(seed)
    while True:
        yield {"table": [_rows(random, 20_000, 32, (random.zipf(1.1, 300) - 1) % 20_000) for _ in range(ranks)]}


def uniform_rows(ranks: int, seed: int) -> Iterator[Step]:
    """The same table, 40 rows on each rank, all rows equally likely."""
    random = np.random.default_rng(seed)
    while True:
        yield {"table": [_rows(random, 20_000, 32, random.integers(0, 20_000, 40)) for _ in range(ranks)]}


def uniform_elements(ranks: int, seed: int) -> Iterator[Step]:
    """Half a million elements, of which each rank holds 1,000, all equally likely."""
    random = np.random.default_rng(seed)
    while True:
        yield {"weights": [_elements(random, 500_000, 1_000) for _ in range(ranks)]}


def bursts(ranks: int, seed: int) -> Iterator[Step]:
    """As many elements; each rank holds 200, but in 3 of 100 steps ten times as many, all ranks at once."""
    random = np.random.default_rng(seed)
    for number in count():
        held = 2_000 if number % 100 in (50, 51, 52) else 200
        yield {"weights": [_elements(random, 500_000, held) for _ in range(ranks)]}


def up_and_down(ranks: int, seed: int) -> Iterator[Step]:
    """100,000 elements: for 100 steps each 0.1 %, 20 %, all, and back to 0.1 % of them on each rank."""
    random = np.random.default_rng(seed)
    for number in count():
        held = (100, 20_000, 100_000, 100)[number // 100 % 4]
        yield {"weights": [_elements(random, 100_000, held) for _ in range(ranks)]}


def dense(ranks: int, seed: int) -> Iterator[Step]:
    """100,000 elements, none of them zero."""
    random = np.random.default_rng(seed)
    while True:
        yield {"weights": [random.normal(size=100_000).astype(np.float32) for _ in range(ranks)]}


def _rows(random: np.random.Generator, rows: int, row: int, drawn: NDArray[Any]) -> Array:
    x = np.zeros((rows, row), np.float32)
    drawn = np.unique(drawn)
    x[drawn] = random.normal(size=(len(drawn), row))
    return x


def _elements(random: np.random.Generator, numel: int, held: int) -> Array:
    x = np.zeros(numel, np.float32)
    x[random.choice(numel, held, replace=False)] = random.normal(size=held)
    return x


#: name -> what makes the history, from the number of ranks and a seed
HISTORIES: dict[str, Callable[[int, int], Iterator[Step]]] = {
    function.__name__: function
    for function in (ncf, text, embedding_bag, zipf_rows, uniform_rows, uniform_elements, bursts, up_and_down, dense)
}
