"""One rank of ``cluster.py aggregate``: times the reduction of one tensor by every method, in turn, and checks the results.

``aggregate_worker.py OPTIONS`` with options as JSON; rank 0 prints one JSON line per case.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_lhc.torch import LHC

SENT_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")
#: Reductions before those that are timed: a compressor probes, takes room for the ranks' sum, then for their union.
WARM_UPS = 4
#: Of the positions that a rank has, so many are everybody's in "identical"; in "zipf_rows" rows are drawn by Zipf's law.
ROW = 64
ZIPF_EXPONENT = 1.1


def draw(numel: int, density: float, support: str, rank: int, size: int, seed: int) -> torch.Tensor:
    """This rank's gradient: about ``density`` of the elements of the ranks' sum are nonzero."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])
    gradient = np.zeros(numel, np.float32)
    count = max(1, int(numel * density))
    if support == "identical":
        positions = shared.choice(numel, count, replace=False)
    elif support == "independent":
        positions = own.choice(numel, max(1, count // size), replace=False)
    elif support == "identical_rows":
        rows = shared.choice(numel // ROW, max(1, count // ROW), replace=False)
        positions = (rows[:, None] * ROW + np.arange(ROW)).reshape(-1)
    elif support == "zipf_rows":
        rows = _zipf_rows(numel // ROW, max(1, count // ROW), size, own, seed)
        positions = (rows[:, None] * ROW + np.arange(ROW)).reshape(-1)
    else:
        raise ValueError(support)
    values = own.normal(size=len(positions)).astype(np.float32)
    values[values == 0] = 1
    gradient[positions] = values
    return torch.from_numpy(gradient if "rows" not in support else gradient[: numel // ROW * ROW].reshape(-1, ROW))


def _zipf_rows(rows: int, wanted: int, size: int, own: Any, seed: int) -> Any:
    """Rows that one rank draws, so many that the ranks' union has about the number that is wanted."""
    weights = 1.0 / np.arange(1, rows + 1) ** ZIPF_EXPONENT
    weights /= weights.sum()
    order = np.random.default_rng(seed).permutation(rows)
    low, high = 1, 50 * wanted  # draws of all ranks together
    while low < high:
        draws = (low + high) // 2
        if (1 - np.exp(-draws * weights)).sum() < wanted:
            low = draws + 1
        else:
            high = draws
    drawn = np.searchsorted(np.cumsum(weights), own.random(max(1, low // size)))
    return order[np.unique(np.minimum(drawn, rows - 1))]


def methods(gradient: torch.Tensor) -> dict[str, Callable[[str], Any]]:
    """Every way to reduce a gradient; each gives the sum. The sparse form is made beforehand, as a favour to the allgather."""
    lossless, bounded = LHC(), LHC(precision="bounded")
    sparse = gradient.reshape(-1).to_sparse()
    return {
        "none": lambda name: hvd.allreduce(gradient, op=hvd.Sum, name=name),
        "fp16": lambda name: hvd.allreduce(gradient, op=hvd.Sum, name=name, compression=hvd.Compression.fp16),
        "allgather": lambda name: hvd.sparse_allreduce_async(sparse, name, hvd.Sum)(),
        "lhc": lambda name: hvd.allreduce(gradient, op=hvd.Sum, name=name, compression=lossless),
        "lhc bounded": lambda name: hvd.allreduce(gradient, op=hvd.Sum, name=name, compression=bounded),
    }


def measure(case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds, bytes and processor seconds of each method: medians over repeats, of the slowest rank."""
    rank, size = hvd.rank(), hvd.size()
    gradient = draw(case["numel"], case["density"], case["support"], rank, size, 1)
    label = f"{case['numel']}.{case['density']}.{case['support']}"
    ways = methods(gradient)
    taken: dict[str, list[list[float]]] = {method: [] for method in ways}
    exact = _exact_sum(gradient)
    errors = {}
    for method, reduce in ways.items():
        for _ in range(WARM_UPS if method.startswith("lhc") else 1):
            result = reduce(f"{label}.{method}")
        dense = result.to_dense() if result.is_sparse else result
        errors[method] = float((dense.reshape(-1).double() - exact).abs().max())
        del result, dense
    gc.disable()
    for _ in range(repeats):
        for method, reduce in ways.items():
            hvd.allreduce(torch.zeros(1), name="barrier")
            sent, cpu, began = int(SENT_BYTES.read_text()), time.process_time(), time.perf_counter()
            result = reduce(f"{label}.{method}")
            seconds = time.perf_counter() - began
            taken[method].append([seconds, int(SENT_BYTES.read_text()) - sent, time.process_time() - cpu])
            del result
        gc.collect()
    gc.enable()
    everybody = hvd.allgather_object(taken, name=f"taken {label}")
    rows = {}
    for method in ways:
        repeats_of = [[each[method][i] for each in everybody] for i in range(repeats)]
        rows[method] = {
            "seconds": statistics.median(max(rank[0] for rank in ranks) for ranks in repeats_of),
            "bytes": statistics.median(max(rank[1] for rank in ranks) for ranks in repeats_of),
            "cpu_seconds": statistics.median(statistics.mean(rank[2] for rank in ranks) for ranks in repeats_of),
            "largest_error": max(hvd.allgather_object(errors[method], name=f"error {label} {method}")),
        }
    union = int(torch.count_nonzero(exact))
    return {**case, "ranks": size, "union_density": union / case["numel"], "methods": rows}


def _exact_sum(gradient: torch.Tensor) -> torch.Tensor:
    """In float64, where sums of these values have no error worth mentioning; rounded to float32."""
    total: torch.Tensor = hvd.allreduce(gradient.reshape(-1).double(), op=hvd.Sum, name="exact")
    return total.float().double()


def main() -> None:
    """Measure all cases."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    for case in options["cases"]:
        result = measure(case, options["repeats"])
        if hvd.rank() == 0:
            print("RESULT " + json.dumps(result), flush=True)
    hvd.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
