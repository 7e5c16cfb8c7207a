"""Wire bytes and codec times, beside a plain copy of the same array in the same run.

    python benchmarks/codec.py [--numel 25000000] [--ranks 4] [--density 0.001 0.01 0.05] [--parts 1 2]

Every row is checked: the decoded sum must be exact, or the program ends with an error.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import hvd_lhc
from hvd_lhc import Codec, Plan


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the float32 array")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.05], help="of the ranks' union")
    parser.add_argument("--shared", type=float, default=0.8, help="share of the union that all ranks have")
    parser.add_argument("--block", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--parts", type=int, nargs="+", default=[1])
    parser.add_argument("--repeat", type=int, default=7, help="timed runs; the median is shown")
    return parser.parse_args()


def make_gradients(numel: int, ranks: int, density: float, shared: float, block: int) -> list[np.ndarray[Any, Any]]:
    """Sparse normal gradients whose blocks' union has about ``density``; values are multiples of 2**-30 below 8."""
    rng = np.random.default_rng(2024)
    blocks = numel // block
    union = rng.choice(blocks, int(blocks * density), replace=False)
    common = union[: int(len(union) * shared)]
    rest = np.array_split(union[len(common) :], ranks)
    gradients = []
    for rank in range(ranks):
        x = np.zeros((blocks, block), np.float32)
        mine = np.concatenate([common, rest[rank]])
        x[mine] = np.round(rng.standard_normal((len(mine), block)) * 2**20) / 2**20 + 2.0**-21
        gradients.append(np.concatenate([x.ravel(), np.zeros(numel - x.size, np.float32)]))
    return gradients


def median_seconds(function: Callable[[], Any], repeat: int) -> float:
    """Median wall time of ``repeat`` calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(gradients: list[np.ndarray[Any, Any]], plan: Plan, repeat: int) -> tuple[float, float, float]:
    """Seconds of encode, decode and a copy; raises if the decoded sum isn't exact."""
    codec = Codec(plan)
    wire = np.empty(plan.wire_size)
    total = codec.encode(gradients[0], rank=0)
    for rank, x in enumerate(gradients[1:], 1):
        total += codec.encode(x, rank=rank, out=wire)
    exact = np.sum(gradients, axis=0, dtype=np.float64).astype(np.float32)
    if not np.array_equal(codec.decode(total), exact):
        raise SystemExit(f"not exact: {plan}")
    copy = np.empty_like(exact)
    return (
        median_seconds(lambda: codec.encode(gradients[0], rank=0, out=wire), repeat),
        median_seconds(lambda: codec.decode(total), repeat),
        median_seconds(lambda: np.copyto(copy, exact), repeat),
    )


def main() -> None:
    """Print the table."""
    options = parse_arguments()
    console = Console(width=130)
    console.print(
        f"hvd_lhc {hvd_lhc.__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {platform.machine()}; "
        f"{options.numel:,} float32, {options.ranks} ranks, {options.shared:.0%} of the union shared, one thread"
    )
    table = Table("union", "block", "index", "parts", "bytes/element", "dense/wire", "encode ms", "decode ms", "copy ms")
    for density in options.density:
        for block in options.block:
            gradients = make_gradients(options.numel, options.ranks, density, options.shared, block)
            keys = int(options.numel // block * density)
            for index in ("keyed", "bitmap"):
                for parts in options.parts:
                    plan = Plan(
                        numel=options.numel,
                        world_size=options.ranks,
                        capacity=keys,
                        index=index,
                        block=block,
                        parts=parts,
                        exponent=3,
                    )
                    encode, decode, copy = measure(gradients, plan, options.repeat)
                    table.add_row(
                        f"{density:.1%}",
                        str(block),
                        index,
                        str(parts),
                        f"{plan.wire_bytes / options.numel:.4f}",
                        f"{4 * options.numel / plan.wire_bytes:.1f}",
                        *(f"{1e3 * seconds:.1f}" for seconds in (encode, decode, copy)),
                    )
    console.print(table)


if __name__ == "__main__":
    main()
