"""Starts ``horovodrun`` with a command of its own, for tests that need a job to themselves, and ends it in any case."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["ENVIRONMENT", "WORKERS", "environment", "horovodrun", "stop"]

WORKERS = Path(__file__).parent / "workers"
REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    # A rank that failed waits for the others at the end of a case; a rank that waits for it elsewhere is released by this.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "15",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",
}


def environment(**more: str) -> dict[str, str]:
    """What every rank gets: the package, one thread, no GPU."""
    everything = {**os.environ, **ENVIRONMENT, **more}
    installed = importlib.util.find_spec("hvd_lhc")
    path = [everything.get("PYTHONPATH"), None if installed else str(REPOSITORY), str(WORKERS)]
    everything["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return everything


def horovodrun(options: list[str], command: list[str], timeout: float, **more: str) -> tuple[int, str]:
    """Run Python under ``horovodrun``.

    Args:
        options: of horovodrun.
        command: arguments of Python.
        timeout: in seconds, after which the job is ended.
        more: variables of the environment.

    Returns:
        The exit status, and everything that was printed.
    """
    started = [sys.executable, "-m", "horovod.runner.launch", "--gloo", *options, sys.executable, *command]
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            started, stdout=printed, stderr=subprocess.STDOUT, env=environment(**more), start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            stop(process)
        printed.seek(0)
        return process.returncode, printed.read()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End horovodrun, which ends its ranks; then whatever of its group is left."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
