"""How often a table that is exactly full can't be peeled: the counts behind the geometry in docs/wire-format.md.

    python benchmarks/peel_odds.py [--trials 1000000] [--seconds 600] [--keys 5 10 20 50 ...]

Every trial draws a fresh seed and fresh keys, encodes one rank's array and decodes it; ``--support`` says how keys lie.
A failure costs one dense reduction in training; a planner leaves headroom, so that tables are seldom full.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import numpy as np
from tqdm import tqdm

from hvd_lhc import Codec, DecodeError, Plan
from hvd_lhc.reference.layout import TABLE_ROWS

#: Where the rows of the geometry's table end: the fewest cells per key.
LIMITS = [row[0] for row in TABLE_ROWS if row[0] <= 131_072]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1_000_000, help="at most, for each size")
    parser.add_argument("--seconds", type=float, default=60, help="at most, for each size")
    parser.add_argument("--keys", type=int, nargs="+", default=LIMITS)
    parser.add_argument("--space", type=int, default=500, help="keys of the space per key that is present")
    parser.add_argument("--headroom", type=float, default=1.0, help="capacity over keys")
    parser.add_argument("--support", choices=["random", "run", "stride"], default="random")
    parser.add_argument("--index", choices=["keyed", "bitmap"], default="bitmap")
    parser.add_argument("--block", type=int, default=1, help="elements per key")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that count at the same time")
    return parser.parse_args()


def draw_support(rng: np.random.Generator, kind: str, keys: int, numel: int) -> np.ndarray[Any, Any]:
    """Distinct element numbers: anywhere, one run, or evenly spaced."""
    if kind == "run":
        return rng.integers(numel - keys) + np.arange(keys)
    if kind == "stride":
        return np.arange(keys) * (numel // keys) + rng.integers(numel // keys)
    return rng.choice(numel, keys, replace=False)


def count_failures(options: argparse.Namespace, keys: int, trials: int, seed: int, end: float) -> tuple[int, int]:
    """Failures and trials, until there were so many or ``time.time()`` is at the end."""
    rng = np.random.default_rng(seed)
    space = keys * options.space
    x = np.zeros(space * options.block, np.float32)
    failed = 0
    for number in range(trials):
        if time.time() > end:
            return failed, number
        codec = Codec(plan_of(options, keys, int(rng.integers(2**63))))
        support = draw_support(rng, options.support, keys, space) * options.block
        x[support] = 1
        try:
            codec.decode(codec.encode(x) + codec.encode(x))
        except DecodeError as error:
            if error.reason != "unpeeled":
                raise
            failed += 1
        x[support] = 0
    return failed, trials


def plan_of(options: argparse.Namespace, keys: int, seed: int) -> Plan:
    """A table of two ranks for so many keys."""
    return Plan(
        numel=keys * options.space * options.block,
        world_size=2,
        capacity=int(keys * options.headroom),
        index=options.index,
        block=options.block,
        exponent=1,
        seed=seed,
    )


def main() -> None:
    """Print a line per size."""
    options = parse_arguments()
    seeds = iter(np.random.SeedSequence().generate_state(100_000, np.uint64))
    print(
        f"{'keys':>8} {'cells/key':>9} {'failed':>7} {'trials':>8}   ({options.support} support, {options.space} keys of the "
        f"space per key, blocks of {options.block}, {options.index}, headroom {options.headroom})"
    )
    chunk = max(1, options.trials // 200)
    with ProcessPoolExecutor(options.processes) as pool:
        for keys in options.keys:
            end = time.time() + options.seconds
            starts = range(0, options.trials, chunk)
            jobs = [
                pool.submit(count_failures, options, keys, min(chunk, options.trials - start), int(next(seeds)), end)
                for start in starts
            ]
            failed = trials = 0
            for job in tqdm(as_completed(jobs), total=len(jobs), leave=False, disable=None):
                more_failed, more_trials = job.result()
                failed, trials = failed + more_failed, trials + more_trials
            print(f"{keys:8} {plan_of(options, keys, 0).layout.cell_count / keys:9.3f} {failed:7} {trials:8}", flush=True)


if __name__ == "__main__":
    main()
