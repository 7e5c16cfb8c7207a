"""An elastic job with PyTorch: nothing needs to be said about the compressor."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from elastic_model import ROW, ROWS, STEPS, STEPS_BETWEEN_COMMITS, gradient, happen, report

from hvd_lhc.torch import LHC


def main() -> None:
    """Train, report."""
    torch.set_num_threads(1)
    hvd.init()
    lhc = LHC()
    model = torch.nn.Linear(ROW, ROWS, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), lhc, op=hvd.Sum)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, history=[])

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.step < STEPS:
            happen(state.step, hvd.rank(), hvd.size())
            optimizer.zero_grad()
            (model.weight * torch.from_numpy(gradient(state.step, hvd.rank()))).sum().backward()
            optimizer.step()
            state.history = [*state.history, (state.step, hvd.size())]
            state.step += 1
            if state.step % STEPS_BETWEEN_COMMITS == 0:
                state.commit()

    train(state)
    report(hvd.rank(), model.weight.detach().numpy(), state.history, lhc.statistics.sketches)


if __name__ == "__main__":
    main()
