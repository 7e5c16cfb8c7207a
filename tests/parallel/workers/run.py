"""What ``horovodrun`` starts on every rank: ``run.py SUITE DIRECTORY CASE ...``.

Runs the cases in turn and writes one JSON line for each: its name, and an empty string or the traceback. Ranks meet
after every case, so that a rank that failed doesn't run ahead. A case in which ranks wait for each other is ended by
Horovod's stall check or by a watchdog that prints where every thread is; then the job ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import harness

CASE_TIMEOUT_SECONDS = 90
#: What a suite must not load: adapters are independent.
FOREIGN = {
    **dict.fromkeys(("torch", "torchsets"), "tensorflow"),
    **dict.fromkeys(("tensorflow", "tensorflowsets", "keras", "keras3"), "torch"),
}


def main(suite: str, directory: str, *names: str) -> int:
    """Run cases; returns the exit status."""
    for path in sorted(Path(__file__).parent.glob(f"{suite}_*.py")):
        importlib.import_module(path.stem)
    common = importlib.import_module(f"{suite}_common")
    rank = common.start()
    failures = 0
    with (Path(directory) / f"rank{rank}.jsonl").open("w") as report:
        for name in (name for name in harness.CASES if name in names):
            faulthandler.dump_traceback_later(CASE_TIMEOUT_SECONDS, exit=True)
            failure = run_case(name, rank)
            failures += bool(failure)
            print(json.dumps([name, failure]), file=report, flush=True)
            common.meet(f"after {name}")
            faulthandler.cancel_dump_traceback_later()
        if FOREIGN[suite] in sys.modules:
            print(f"rank {rank}: the {suite} suite loaded {FOREIGN[suite]}", file=sys.stderr)
            failures += 1
    return min(failures, 1)


def run_case(name: str, rank: int) -> str:
    """Run one case. Returns the traceback of its failure, or an empty string."""
    try:
        harness.CASES[name]()
    except Exception:
        failure = traceback.format_exc()
        print(f"rank {rank}: {name} failed\n{failure}", file=sys.stderr, flush=True)
        return failure
    return ""


if __name__ == "__main__":
    try:
        status = main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)  # the others may wait for us in vain: no orderly shutdown
