"""How often a table that is exactly full can't be peeled: the counts behind the geometry in docs/wire-format.md.

    python benchmarks/peel_odds.py [--trials 200000] [--seconds 60] [--keys 24 36 48 ...]

Every trial draws a fresh seed and fresh keys, encodes one rank's array and decodes it; ``--support`` says how keys lie.
A failure costs one dense reduction in training; a planner leaves headroom, so that tables are seldom full.
"""

from __future__ import annotations

import argparse
import time
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
    parser.add_argument("--trials", type=int, default=200_000, help="at most, for each size")
    parser.add_argument("--seconds", type=float, default=60, help="at most, for each size")
    parser.add_argument("--keys", type=int, nargs="+", default=LIMITS)
    parser.add_argument("--space", type=int, default=500, help="keys of the space per key that is present")
    parser.add_argument("--headroom", type=float, default=1.0, help="capacity over keys")
    parser.add_argument("--support", choices=["random", "run", "stride"], default="random")
    parser.add_argument("--index", choices=["keyed", "bitmap"], default="bitmap")
    return parser.parse_args()


def draw_support(rng: np.random.Generator, kind: str, keys: int, numel: int) -> np.ndarray[Any, Any]:
    """Distinct element numbers: anywhere, one run, or evenly spaced."""
    if kind == "run":
        return rng.integers(numel - keys) + np.arange(keys)
    if kind == "stride":
        return np.arange(keys) * (numel // keys) + rng.integers(numel // keys)
    return rng.choice(numel, keys, replace=False)


def main() -> None:
    """Print a line per size."""
    options = parse_arguments()
    rng = np.random.default_rng()
    print(f"{'keys':>8} {'cells/key':>9} {'failed':>7} {'trials':>8}   ({options.support} support, headroom {options.headroom})")
    for keys in options.keys:
        numel = keys * options.space
        x = np.zeros(numel, np.float32)
        failed = trials = 0
        end = time.monotonic() + options.seconds
        for _ in tqdm(range(options.trials), leave=False, disable=None):
            trials += 1
            seed = int(rng.integers(2**63))
            capacity = int(keys * options.headroom)
            plan = Plan(numel=numel, world_size=2, capacity=capacity, index=options.index, exponent=1, seed=seed)
            support = draw_support(rng, options.support, keys, numel)
            x[support] = 1
            codec = Codec(plan)
            try:
                codec.decode(codec.encode(x) + codec.encode(x))
            except DecodeError:
                failed += 1
            x[support] = 0
            if time.monotonic() > end:
                break
        print(f"{keys:8} {plan.layout.cell_count / keys:9.3f} {failed:7} {trials:8}", flush=True)


if __name__ == "__main__":
    main()
