"""Neural collaborative filtering on MovieLens-100K, in PyTorch under Horovod.

    horovodrun -np 2 python examples/pytorch_ncf.py --compression lhc

The model is NeuMF (He et al., Neural Collaborative Filtering, WWW 2017): a generalized matrix
factorization beside a multi-layer perceptron, each with its own embeddings of users and items.
Embeddings make up most of its gradient, and a batch touches few of their rows: most of what
Horovod reduces is zeros. The line that changes is marked in ``main``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import horovod.torch as hvd
import numpy as np
import torch
from common import Recorder, make_parser, median_ms, positive_int
from movielens import Batch, DatasetError, Ids, MovieLens, fetch
from torch import Tensor, nn

import hvd_lhc.torch


class NeuMF(nn.Module):
    """Neural matrix factorization; ``factors`` is the width of what the two towers hand on."""

    def __init__(self, users: int, items: int, factors: int) -> None:
        super().__init__()
        self.gmf_user = nn.Embedding(users, factors)
        self.gmf_item = nn.Embedding(items, factors)
        self.mlp_user = nn.Embedding(users, 2 * factors)
        self.mlp_item = nn.Embedding(items, 2 * factors)
        self.mlp = nn.Sequential(
            nn.Linear(4 * factors, 2 * factors),
            nn.ReLU(),
            nn.Linear(2 * factors, factors),
            nn.ReLU(),
        )
        self.predict = nn.Linear(2 * factors, 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.01)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logit that each user meets the item beside it; all of shape (samples,)."""
        gmf = self.gmf_user(users) * self.gmf_item(items)
        mlp = self.mlp(torch.cat([self.mlp_user(users), self.mlp_item(items)], dim=1))
        return self.predict(torch.cat([gmf, mlp], dim=1)).squeeze(1)


def loss_of(model: NeuMF, batch: Batch) -> Tensor:
    """Return the mean binary cross-entropy of a batch."""
    users, items, labels = map(torch.from_numpy, (batch.users, batch.items, batch.labels))
    return nn.functional.binary_cross_entropy_with_logits(model(users, items), labels)


def local_gradients(model: NeuMF, batch: Batch) -> tuple[Tensor, ...]:
    """Return this rank's own gradients; nothing is exchanged, nothing is changed."""
    return torch.autograd.grad(loss_of(model, batch), list(model.parameters()))


@torch.no_grad()
def evaluate(model: NeuMF, data: MovieLens) -> dict[str, float]:
    """Return HR@10 and NDCG@10; each rank ranks its share of the users."""

    def score(users: Ids, items: Ids) -> np.ndarray:
        return model(torch.from_numpy(users), torch.from_numpy(items)).numpy()

    sums = data.evaluate(score, rank=hvd.rank(), size=hvd.size())
    hits, gains, users = hvd.allreduce(torch.from_numpy(sums), op=hvd.Sum, name="eval").tolist()
    return {"HR@10": hits / users, "NDCG@10": gains / users}


def load_data(seed: int) -> MovieLens:
    """Let one rank of each machine fetch the ratings, then read them on all."""
    problem = None
    if hvd.local_rank() == 0:
        try:
            fetch()
        except DatasetError as error:
            problem = error
    for found in hvd.allgather_object(problem, name="fetch"):
        if found is not None:
            raise found
    return MovieLens.load(fetch(), seed)


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = make_parser(
        "Neural collaborative filtering on MovieLens-100K",
        epochs=3,
        batch_size=16,
        batch_help="interactions per rank and step; each brings --negatives samples more",
        lr=1e-3,
    )
    parser.add_argument("--negatives", type=positive_int, default=4, help="per interaction")
    parser.add_argument("--factors", type=positive_int, default=32, help="width of the towers")
    return parser.parse_args()


def main() -> None:
    """Train, and report on rank 0."""
    args = parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    data = load_data(args.seed)
    batches = partial(
        data.batches,
        args.batch_size,
        args.negatives,
        seed=args.seed,
        rank=hvd.rank(),
        size=hvd.size(),
    )

    model = NeuMF(data.users, data.items, args.factors)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    compression = getattr(hvd_lhc.torch.Compression, args.compression)

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,  # <-- hvd_lhc.torch.Compression.lhc: this is all that changes
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    recorder = Recorder(
        args,
        "pytorch_ncf",
        rank=hvd.rank(),
        size=hvd.size(),
        steps=args.epochs * data.steps_per_epoch(args.batch_size, hvd.size()),
        allgather_object=hvd.allgather_object,
    )
    first = next(batches(epoch=0))
    compute_ms = median_ms(lambda: local_gradients(model, first))
    recorder.add_metrics(evaluate(model, data))

    for epoch in range(args.epochs):
        for batch in recorder.steps(batches(epoch=epoch)):
            if recorder.wants_density():
                local = local_gradients(model, batch)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            if recorder.wants_density():
                names, parameters = zip(*model.named_parameters(), strict=True)
                recorder.add_density(names, local, [p.grad for p in parameters])
            recorder.add_loss(loss.item())
        recorder.add_metrics(evaluate(model, data))
        if recorder.finished:
            break

    recorder.finish(
        weights=[(name, tensor.numpy()) for name, tensor in model.state_dict().items()],
        compute_ms=compute_ms,
        gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        compression=compression,
    )


if __name__ == "__main__":
    try:
        main()
    except DatasetError as error:
        sys.exit(f"pytorch_ncf: {error}")
