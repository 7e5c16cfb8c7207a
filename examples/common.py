"""What the examples share: flags, the progress bar, timing, and the record of a run.

Nothing here belongs to hvd_lhc. Copy the training loops from ``pytorch_ncf.py`` or
``tensorflow2_text.py``; this file only measures them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

COMPRESSIONS = ("none", "fp16", "lhc")

#: The density report looks at every so-manieth step: it computes the local gradients once more.
DENSITY_EVERY = 20

Batch = TypeVar("Batch")


def make_parser(
    description: str, *, epochs: int, batch_size: int, batch_help: str, lr: float
) -> argparse.ArgumentParser:
    """Return a parser with the flags of every example, to which an example adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=positive_int, default=epochs, help="passes over the data")
    parser.add_argument("--batch-size", type=positive_int, default=batch_size, help=batch_help)
    parser.add_argument("--lr", type=float, default=lr, help="learning rate of Adam, not scaled")
    parser.add_argument("--seed", type=int, default=42, help="seed of weights and data order")
    parser.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        default="lhc",
        help="what the gradients go through: nothing, Horovod's fp16, or lossless compression",
    )
    parser.add_argument("--steps", type=positive_int, default=None, help="stop after this many steps")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="progress bar on rank 0; None: if stderr is a terminal (under horovodrun it isn't)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--save-weights-hash",
        type=Path,
        metavar="FILE",
        help="write the SHA-256 of the final weights' bits to FILE",
    )
    parser.add_argument(
        "--report-density",
        action="store_true",
        help="debugging: report how sparse each gradient is, here and summed over the ranks",
    )
    return parser


def positive_int(text: str) -> int:
    """Parse a flag that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


@dataclass(frozen=True)
class TensorDensity:
    """How sparse one gradient was, as means over the sampled steps (fractions, not percent)."""

    name: str
    shape: tuple[int, ...]
    #: nonzero elements of this rank's gradient
    local: float
    #: nonzero elements of the sum over all ranks
    union: float
    #: rows of the sum that hold a nonzero element
    union_rows: float


@dataclass(frozen=True)
class RunResult:
    """The record of one training run; ``--json`` writes it, ``demo.py`` compares two of them."""

    example: str
    compression: str
    ranks: int
    steps: int
    #: wall-clock time of all steps, without loading of data and evaluation
    training_seconds: float
    #: median time of a step, and of its forward and backward pass alone (no exchange, no update)
    step_ms: float
    compute_ms: float
    #: bytes that this rank handed to allreduce, and those of the gradients as they are
    wire_bytes_per_step: float
    dense_bytes_per_step: int
    #: mean over the last 100 steps and all ranks
    final_loss: float
    #: quality on held-out data, at the end and before the first step
    metrics: dict[str, float]
    untrained: dict[str, float]
    #: SHA-256 over every rank's loss at every step
    losses_sha256: str
    #: SHA-256 over names, shapes and bits of all weights
    weights_sha256: str
    ranks_agree: bool
    #: counters of ``LHC.statistics``; empty for other compressions
    lhc: dict[str, int] = field(default_factory=dict)
    density: list[TensorDensity] = field(default_factory=list)


class Recorder:
    """Watches a training loop: times steps, keeps losses, draws the progress bar on rank 0.

    ``rank``, ``size`` and ``allgather_object`` are those of ``horovod.torch`` or
    ``horovod.tensorflow``, so that this file needs neither.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        example: str,
        *,
        rank: int,
        size: int,
        steps: int,
        allgather_object: Callable[[Any], list[Any]],
    ) -> None:
        self.args = args
        self.example = example
        self.rank = rank
        self.size = size
        self.total_steps = steps if args.steps is None else min(steps, args.steps)
        self.untrained: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self._allgather_object = allgather_object
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._densities: dict[str, list[TensorDensity]] = {}
        hidden = args.progress is False or rank != 0
        self._bar = tqdm(
            total=self.total_steps,
            desc=f"{example} {args.compression}",
            unit="step",
            leave=False,
            disable=hidden or (None if args.progress is None else False),
        )
        if size == 1:
            self.say(
                "Note: with one rank Horovod exchanges nothing, so nothing is compressed. "
                f"Try: horovodrun -np 2 python {sys.argv[0]}"
            )

    def say(self, text: str) -> None:
        """Print a line on rank 0, above the progress bar."""
        if self.rank == 0:
            self._bar.clear()
            print(text, flush=True)
            self._bar.refresh()

    @property
    def finished(self) -> bool:
        """Whether the last step is done (``--steps`` may end a run within an epoch)."""
        return len(self._losses) >= self.total_steps

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, timing what the loop does with each; loading isn't counted."""
        for batch in batches:
            if self.finished:
                return
            start = time.perf_counter()
            yield batch
            self._seconds.append(time.perf_counter() - start)
            self._bar.update()

    def add_loss(self, loss: float) -> None:
        """Take the loss of the running step on this rank."""
        self._losses.append(loss)
        if len(self._losses) % 20 == 0:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Report the quality on held-out data: before the first step, and after each epoch."""
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if not self._losses:
            self.untrained = metrics
            self.say(f"untrained: {values}")
        else:
            self.metrics = metrics
            loss = statistics.fmean(self._losses[-100:])
            self.say(f"after {len(self._losses)} steps: loss {loss:.4f}, {values}")

    def wants_density(self) -> bool:
        """Whether the running step is one that the density report looks at."""
        return self.args.report_density and len(self._seconds) % DENSITY_EVERY == 0

    def add_density(self, names: Iterable[str], local: Iterable[Any], reduced: Iterable[Any]) -> None:
        """Count the nonzeros of this rank's gradients and of the reduced ones (NumPy-like)."""
        for name, mine, total in zip(names, local, reduced, strict=True):
            mine, total = np.asarray(mine), np.asarray(total)
            rows = total.reshape(len(total), -1).any(axis=1)
            self._densities.setdefault(name, []).append(
                TensorDensity(
                    name,
                    total.shape,
                    local=np.count_nonzero(mine) / mine.size,
                    union=np.count_nonzero(total) / total.size,
                    union_rows=np.count_nonzero(rows) / rows.size,
                )
            )

    def finish(
        self,
        *,
        weights: Sequence[tuple[str, NDArray[Any]]],
        compute_ms: float,
        gradient_bytes: int,
        compression: Any,
    ) -> RunResult:
        """Compare the ranks, put the record together, print and write it. Every rank calls this."""
        self._bar.close()
        weights_hash = weights_sha256(weights)
        losses = np.asarray(self._losses, dtype=np.float64)
        mine = (weights_hash, hashlib.sha256(losses.tobytes()).hexdigest(), losses[-100:].mean())
        everyone = self._allgather_object(mine)
        counters = lhc_counters(compression)
        result = RunResult(
            example=self.example,
            compression=self.args.compression,
            ranks=self.size,
            steps=len(losses),
            training_seconds=sum(self._seconds),
            step_ms=1e3 * statistics.median(self._seconds),
            compute_ms=compute_ms,
            wire_bytes_per_step=wire_bytes_per_step(self.args.compression, gradient_bytes, len(losses), counters),
            dense_bytes_per_step=gradient_bytes,
            final_loss=statistics.fmean(loss for _, _, loss in everyone),
            metrics=self.metrics,
            untrained=self.untrained,
            losses_sha256=hashlib.sha256("".join(h for _, h, _ in everyone).encode()).hexdigest(),
            weights_sha256=weights_hash,
            ranks_agree=all(other == weights_hash for other, _, _ in everyone),
            lhc=counters,
            density=[mean_density(seen) for seen in self._densities.values()],
        )
        if self.rank == 0:
            self._publish(result)
        return result

    def _publish(self, result: RunResult) -> None:
        """Print the record; write it where the flags say."""
        print(summary(result), flush=True)
        if self.args.json:
            self.args.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
        if self.args.save_weights_hash:
            self.args.save_weights_hash.write_text(result.weights_sha256 + "\n")


def summary(result: RunResult) -> str:
    """Return the record as text for a terminal."""
    agreed = "on every rank" if result.ranks_agree else "NOT THE SAME ON EVERY RANK"
    rows = {
        "time per step": f"{result.step_ms:.2f} ms, of which forward and backward "
        f"take {result.compute_ms:.2f} ms when run alone",
        "bytes per step": f"{result.wire_bytes_per_step:,.0f} on the wire, gradients {result.dense_bytes_per_step:,}",
        "final loss": f"{result.final_loss:.6f}",
        **{name: f"{value:.4f} (untrained {result.untrained[name]:.4f})" for name, value in result.metrics.items()},
        "weights": f"{result.weights_sha256[:16]}… {agreed}",
    }
    if result.lhc:
        rows["lhc"] = ", ".join(f"{name} {n:,}" for name, n in result.lhc.items())
    title = f"{result.example}, compression {result.compression}"
    lines = [f"{title}, {result.ranks} ranks, {result.steps} steps"]
    lines += [f"  {name:<15} {text}" for name, text in rows.items()]
    for one in result.density:
        shape = "x".join(map(str, one.shape))
        lines.append(
            f"  nonzero {one.name:<20} {shape:>10}  this rank {one.local:7.2%}, "
            f"all ranks {one.union:7.2%}, rows {one.union_rows:7.2%}"
        )
    return "\n".join(lines)


def lhc_counters(compression: Any) -> dict[str, int]:
    """Return the counters of an LHC compressor, and nothing for Horovod's own."""
    seen = getattr(compression, "statistics", None)
    names = ("wire_bytes", "dense_bytes", "sketches", "probes", "dense", "retries", "wire_changes")
    return {} if seen is None else {name: int(getattr(seen, name)) for name in names}


def wire_bytes_per_step(compression: str, gradient_bytes: int, steps: int, counters: dict[str, int]) -> float:
    """Return the bytes one rank hands to allreduce: counted for lhc, known for the others."""
    if compression == "lhc":
        return counters["wire_bytes"] / steps
    return gradient_bytes / (2 if compression == "fp16" else 1)


def weights_sha256(weights: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Return a hash that is equal only for weights that agree in every bit."""
    digest = hashlib.sha256()
    for name, array in weights:
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def mean_density(seen: Sequence[TensorDensity]) -> TensorDensity:
    """Return the mean over the sampled steps."""
    return TensorDensity(
        seen[0].name,
        seen[0].shape,
        local=statistics.fmean(one.local for one in seen),
        union=statistics.fmean(one.union for one in seen),
        union_rows=statistics.fmean(one.union_rows for one in seen),
    )


def median_ms(action: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of an action in milliseconds, after two runs to warm up."""
    action(), action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def cache_folder() -> Path:
    """Return this project's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hvd_lhc"
