"""What the elastic jobs of both frameworks train: integers, so that weights tell which steps were taken by how many ranks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
from exact import Array, generator

ROWS, ROW = 3000, 8
STEPS = 40
STEPS_BETWEEN_COMMITS = 5
#: In this step one rank's table has more nonzero rows than its wire can hold.
CROWDED_STEP = 11
STEP_OF_THE_CRASH, STEP_OF_THE_GROWTH = 17, 26
#: horovodrun asks once a second which hosts there are.
SECONDS_TO_DISCOVER = 3.0

#: One (step, number of ranks) for each step that went into the weights.
History = list[tuple[int, int]]


def gradient(step: int, rank: int) -> Array:
    """A rank's table of a step, in which few rows are nonzero."""
    random = generator("elastic", step, rank)
    table = np.zeros((ROWS, ROW), np.float32)
    rows = random.integers(0, ROWS, 800 if step == CROWDED_STEP else 4)
    table[rows] = random.integers(1, 9, (len(rows), ROW))
    return table


def happen(step: int, rank: int, size: int) -> None:
    """A rank on ``HOST_THAT_CRASHES`` ends without a word before its part of a step; later, hosts may come."""
    directory = Path(os.environ["ELASTIC_DIRECTORY"])
    if step == STEP_OF_THE_CRASH and os.environ["HOROVOD_HOSTNAME"] == os.environ["HOST_THAT_CRASHES"]:
        _change_hosts(directory, "hosts-after-the-crash")
        os.kill(os.getpid(), signal.SIGKILL)
    if step == STEP_OF_THE_GROWTH and rank == 0:
        _change_hosts(directory, "hosts-that-come")
    if step > STEP_OF_THE_GROWTH and size == 1:
        time.sleep(1)  # until the others are there


def _change_hosts(directory: Path, name: str) -> None:
    if (directory / name).exists():
        (directory / name).rename(directory / "hosts")
        time.sleep(SECONDS_TO_DISCOVER)


def report(rank: int, weights: Array, history: History, sketches: int) -> None:
    """Write what a rank ended with."""
    expected = np.zeros((ROWS, ROW), np.float32)
    for step, size in history:
        for other in range(size):
            expected -= gradient(step, other)
    facts = {
        "right": bool(np.array_equal(weights, expected)),
        "weights": hashlib.sha256(weights.tobytes()).hexdigest(),
        "history": history,
        "sketches": sketches,
    }
    (Path(os.environ["ELASTIC_DIRECTORY"]) / f"result-{rank}.json").write_text(json.dumps(facts))
