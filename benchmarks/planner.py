"""How well plans are chosen: histories of gradients replayed through planner and codec, in one process.

    python benchmarks/planner.py [--ranks 2 4 8 16] [--steps 400] [--histories ncf text ...]

For every history and number of ranks: bytes per step dense, by the planner and by the best fixed plan chosen with
hindsight (``hindsight.py``); and retries and changes of a wire's shape per 1,000 steps of a tensor. The first steps
(``--warm-up``) are replayed but not counted. Every decoded gradient is compared with the exact sum. ``--detail`` prints a
line per tensor. Histories ``ncf`` and ``text`` need PyTorch, TensorFlow and Horovod.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from itertools import islice

import numpy as np
from hindsight import Need, best_fixed_bytes, need_of
from histories import HISTORIES, Array
from tqdm import tqdm

from hvd_lhc.compressor import Engine, Phase
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor

LINE = "{:17} {:>5} {:>11} {:>11} {:>11} {:>7} {:>7} {:>8} {:>8} {:>7}"
HEAD = ("history", "ranks", "dense", "planner", "hindsight", "ratio", "saved", "retries", "changes", "probes")


@dataclass
class Replay:
    """One tensor on simulated ranks: they share an engine, since all of them would have the same plans.

    Attributes:
        tensor: its shape.
        ranks: how many.
        needs: of the steps that are counted.
        bytes: sent by one rank in them.
        retries, changes, probes: how many in them.
    """

    tensor: Tensor
    ranks: int
    engine: Engine = field(default_factory=lambda: Engine(Settings()))
    phase: Phase = field(default_factory=Phase)
    needs: list[Need] = field(default_factory=list)
    bytes: int = 0
    retries: int = 0
    changes: int = 0
    probes: int = 0

    def step(self, gradients: list[Array], counted: bool) -> str:
        """Reduce the gradients of all ranks. Returns what happened."""
        statistics = self.engine.statistics
        before = {f.name: getattr(statistics, f.name) for f in fields(statistics) if f.type == "int"}
        happened = self._reduce(gradients)
        if counted:
            self.needs.append(need_of(gradients))
            self.bytes += statistics.wire_bytes - before["wire_bytes"]
            self.retries += statistics.retries - before["retries"]
            self.changes += statistics.wire_changes - before["wire_changes"]
            self.probes += statistics.probes - before["probes"]
        return happened

    def _reduce(self, gradients: list[Array]) -> str:
        ticket = self.engine.begin(self.phase, "tensor", self.tensor, self.ranks)
        if ticket is None:
            return "dense"
        wire = sum(self.engine.encode(ticket, x.reshape(-1), rank) for rank, x in enumerate(gradients))
        outcome = self.engine.finish(ticket, wire, "float32")
        if outcome.decoded is None:
            return str(outcome.reason)
        exact = np.sum(gradients, axis=0, dtype=np.float64).astype(np.float32).reshape(-1)
        if not np.array_equal(outcome.decoded.values, exact) and self.ranks == 2:  # more: float64 itself may round
            raise AssertionError("a decoded gradient is not the sum")
        return "sketch"


def replay(name: str, ranks: int, options: argparse.Namespace) -> list[tuple[str, Replay]]:
    """All tensors of a history that are large enough to be compressed."""
    tensors: dict[str, Replay] = {}
    history = islice(HISTORIES[name](ranks, options.seed), options.steps)
    for number, step in enumerate(tqdm(history, total=options.steps, desc=f"{name} {ranks}", leave=False, disable=None)):
        for key, gradients in step.items():
            if key not in tensors:
                shape = gradients[0].shape
                row = gradients[0][0].size if len(shape) > 1 else 1
                tensors[key] = Replay(Tensor(gradients[0].size, row, 4), ranks)
            happened = tensors[key].step(gradients, number >= options.warm_up)
            if options.trace and key == options.trace:
                state = next(iter(tensors[key].phase._sites.values())).state
                tqdm.write(f"{number:5} {happened:14} {one_line(need_of(gradients))} {state}")
    return [(key, one) for key, one in tensors.items() if one.tensor.numel >= Settings.min_numel]


def one_line(need: Need) -> str:
    """Without the tables."""
    return f"elements={need.elements} rows={need.rows} exponent={need.exponent}"


def report(label: str, ranks: int, tensors: list[Replay]) -> None:
    """One line of the table."""
    steps = len(tensors[0].needs)
    dense = sum(one.tensor.dense_bytes for one in tensors)
    planner = sum(one.bytes for one in tensors) / steps
    hindsight = sum(best_fixed_bytes(one.needs, one.tensor, ranks, Settings.max_wire_ratio) for one in tensors)
    rates = [1000 * sum(getattr(t, what) for t in tensors) / steps / len(tensors) for what in ("retries", "changes", "probes")]
    sizes = [f"{size:,.0f}" for size in (dense, planner, hindsight)]
    ratios = [f"{planner / hindsight:.2f}", f"{dense / planner:.2f}"]
    print(LINE.format(label, ranks, *sizes, *ratios, *(f"{rate:.1f}" for rate in rates)), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--histories", nargs="+", choices=HISTORIES, default=list(HISTORIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--detail", action="store_true", help="a line per tensor as well")
    parser.add_argument("--trace", metavar="TENSOR", help="print every step of this tensor")
    options = parser.parse_args()
    print(f"bytes per step of one rank; retries, changes and probes per 1,000 steps of a tensor, after {options.warm_up} steps")
    print(LINE.format(*HEAD))
    for name in options.histories:
        for ranks in options.ranks:
            tensors = replay(name, ranks, options)
            report(name, ranks, [one for _, one in tensors])
            if options.detail and len(tensors) > 1:
                for key, one in tensors:
                    report(f"  {key}", ranks, [one])


if __name__ == "__main__":
    main()
