"""Starts Horovod on the hosts of a cluster: one process on each, over Gloo, as ``horovodrun`` would over ssh."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hosts import INTERFACE, Cluster

__all__ = ["JobResult", "run_job"]


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        status: 0, or of the first process that failed; 124 after the time limit.
        seconds: that it ran.
        bytes_sent: by each host.
        output: of each rank.
    """

    status: int
    seconds: float
    bytes_sent: list[int]
    output: list[str]


def run_job(
    cluster: Cluster,
    command: Sequence[str],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    show: bool = False,
) -> JobResult:
    """Run a command on every host of a cluster, with the environment that Horovod needs.

    Args:
        cluster: where.
        command: what; the same on all hosts.
        timeout: in seconds; then everything is ended.
        environment: more variables.
        show: print what rank 0 prints, and what others write to stderr, as it comes.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    size = len(cluster.names)
    slots = get_host_assignments(parse_hosts(",".join(f"{name}:1" for name in cluster.names)), size)
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)
    before, began = cluster.bytes_sent(), time.monotonic()
    processes, readers = [], []
    output = [""] * size
    for rank, slot in enumerate(slots):
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": cluster.own_address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": INTERFACE,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "PYTHONUNBUFFERED": "1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        process = cluster.start(cluster.names.index(slot.hostname), command, variables, **pipes)
        processes.append(process)
        readers.append(threading.Thread(target=_read, args=(process, rank, output, show and rank == 0), daemon=True))
        readers[-1].start()
    status = _wait(processes, timeout)
    for reader in readers:
        reader.join(10)
    seconds = time.monotonic() - began
    sent = [after - start for after, start in zip(cluster.bytes_sent(), before, strict=True)]
    server.stop()
    return JobResult(status, seconds, sent, output)


def _read(process: subprocess.Popen[str], rank: int, output: list[str], show: bool) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        output[rank] += line
        if show:
            sys.stdout.write(line)
            sys.stdout.flush()


def _wait(processes: list[subprocess.Popen[str]], timeout: float) -> int:
    """Wait for all; when one fails, or time is up, end the others."""
    deadline = time.monotonic() + timeout
    while True:
        states = [process.poll() for process in processes]
        failed = [state for state in states if state]
        if failed or time.monotonic() > deadline:
            time.sleep(1)  # for the others to say why
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            return abs(failed[0]) if failed else 124
        if all(state == 0 for state in states):
            return 0
        time.sleep(0.05)
