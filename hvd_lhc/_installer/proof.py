"""The proof that an installed Horovod works: two processes, one allreduce, for each framework.

Also the program of those processes: ``python -m hvd_lhc._installer.proof torch``.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_lhc.errors import InstallError

PROCESSES = 2
TIMEOUT_SECONDS = 300
_MARK = "allreduce proven"


def prove(framework: str, flags: Mapping[str, str]) -> None:
    """Run the allreduce of one framework under ``horovodrun -np 2``, on the CPU of this machine.

    Raises:
        InstallError: a process failed, hung, or got a wrong sum; the message ends with what was printed.
    """
    package_root = str(Path(__file__).parents[2])
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    controller = "--mpi" if flags.get("HOROVOD_WITHOUT_GLOO") == "1" else "--gloo"
    command = [sys.executable, "-m", "horovod.runner.launch", controller, "-np", str(PROCESSES)]
    command += [sys.executable, "-m", "hvd_lhc._installer.proof", framework]
    status, output = _run(command, variables)
    proven = output.count(f"{framework}: {_MARK}")
    if status != 0 or proven != PROCESSES:
        reason = "hung" if status is None else f"ended with status {status}"
        tail = "\n".join("    " + line for line in output.splitlines()[-25:])
        raise InstallError(
            f"Horovod is installed, but the allreduce of {framework} in two processes {reason} "
            f"(to build it again: --rebuild):\n{tail}"
        )


def _run(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit status (``None`` after the timeout) and output of a command and all it starts."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if status is None:
                _stop(process)
        printed.seek(0)
        return status, printed.read()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End horovodrun, which ends its ranks; then whatever of its group is left."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(framework: str) -> int:
    """One of the processes: sum and average of ``rank + 1``."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    module = importlib.import_module(framework)
    ours = module.ones(5) * (hvd.rank() + 1)
    expected = PROCESSES * (PROCESSES + 1) / 2
    total = float(hvd.allreduce(ours, op=hvd.Sum, name="sum")[0])
    mean = float(hvd.allreduce(ours, op=hvd.Average, name="mean")[0])
    if hvd.size() != PROCESSES or total != expected or mean != expected / PROCESSES:
        print(f"{framework}: size {hvd.size()}, sum {total} for {expected}, mean {mean} for {expected / PROCESSES}")
        return 1
    print(f"{framework}: {_MARK} on rank {hvd.rank()} of {hvd.size()}", flush=True)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
