"""A cluster on one machine: network namespaces as hosts, joined by links of a given rate. Needs root and iproute2.

Each host has an address, a name and a hosts file of its own, and one link to a bridge in a namespace of its own; both directions
of every link are shaped by a token bucket. Another link, which is not shaped, leads to the machine itself, for whoever starts
processes there.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Cluster", "ClusterError", "remove_leftovers"]

#: All names begin with this and the number of the process that made the cluster.
PREFIX = "lhcnet"
NETWORK = "10.77.0"
INTERFACE = "eth0"
BURST_SECONDS = 0.002
LEAST_BURST_BYTES = 128 * 1024
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class ClusterError(Exception):
    """The cluster can't be made here; the message says why."""


def bits_per_second(rate: str) -> int:
    """``100mbit``, ``1gbit``, ``2.5gbit`` -> a number."""
    match = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)", rate.lower())
    if not match:
        raise ClusterError(f"a rate is a number and kbit, mbit or gbit, as in 1gbit; not {rate!r}")
    return int(float(match[1]) * _UNITS[match[2]])


class Cluster:
    """Hosts, as a context manager: they are gone when it ends, however it ends.

    Attributes:
        names: of the hosts.
        addresses: of the hosts.
        own_address: of the machine, as seen from the hosts.
    """

    def __init__(self, count: int, rate: str) -> None:
        """Check what is needed; nothing is made yet.

        Args:
            count: hosts, 1 to 200.
            rate: of each link and direction, as ``tc`` writes it: ``100mbit``, ``1gbit``.

        Raises:
            ClusterError: not root, a program is missing, or an argument is out of range.
        """
        if os.geteuid() != 0:
            raise ClusterError("network namespaces need root: run this with sudo, or in a container as root")
        missing = [program for program in ("ip", "tc", "unshare") if not shutil.which(program)]
        if missing:
            raise ClusterError(f"not found: {', '.join(missing)}. Install iproute2 and util-linux")
        if not 1 <= count <= 200:
            raise ClusterError(f"a cluster has 1 to 200 hosts, not {count}")
        self._bits_per_second = bits_per_second(rate)
        self._stem = f"{PREFIX}{os.getpid()}"
        self._hub = f"{self._stem}-hub"
        self.names = [f"{self._stem}-{i}" for i in range(count)]
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(count)]
        self.own_address = f"{NETWORK}.254"
        self._processes: list[subprocess.Popen[Any]] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Cluster:
        """Make everything; on an error nothing is left."""
        remove_leftovers()
        atexit.register(self._remove)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _exit_on_signal)
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End what runs on the hosts, and remove them."""
        self._remove()
        atexit.unregister(self._remove)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host; ``options`` are those of ``subprocess.Popen``."""
        name = self.names[host]
        within = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *within], env=dict(environment), start_new_session=True, **options
        )
        self._processes.append(process)
        return process

    def bytes_sent(self) -> list[int]:
        """What crossed each host's link so far, from the host into the network; headers of Ethernet and IP included."""
        sent = []
        for name in self.names:
            shown = _run("ip", "-n", name, "-s", "-j", "link", "show", "dev", INTERFACE)
            sent.append(int(json.loads(shown)[0]["stats64"]["tx"]["bytes"]))
        return sent

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        self._make_own_link()
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _run("ip", "netns", "add", name)
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            lines = [f"{a} {n}" for a, n in zip(self.addresses, self.names, strict=True)]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
            _run("ip", "-n", self._hub, "link", "add", f"port{i}", "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "-n", self._hub, "link", "set", f"port{i}", "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._shape(name, INTERFACE)
            self._shape(self._hub, f"port{i}")

    def _make_own_link(self) -> None:
        """The machine's own end lies in the machine's namespace; it goes when the hub's end goes."""
        own = f"{PREFIX[:4]}{os.getpid()}"[:15]
        _run("ip", "-n", self._hub, "link", "add", "own", "type", "veth", "peer", "name", own, "netns", str(os.getpid()))
        _run("ip", "-n", self._hub, "link", "set", "own", "master", "bridge", "up")
        _run("ip", "address", "add", f"{self.own_address}/24", "dev", own)
        _run("ip", "link", "set", own, "up")

    def _shape(self, namespace: str, device: str) -> None:
        burst = max(int(self._bits_per_second / 8 * BURST_SECONDS), LEAST_BURST_BYTES)
        bucket = ["rate", f"{self._bits_per_second}bit", "burst", str(burst), "latency", "100ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 3
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        _remove_namespaces(self._stem)
        for process in self._processes:
            process.wait()
        self._processes.clear()


def remove_leftovers() -> None:
    """Remove clusters whose makers are gone, as after a ``kill -9``."""
    for pid in {int(match[1]) for name in _namespaces() if (match := re.match(rf"{PREFIX}(\d+)-", name))}:
        if not Path(f"/proc/{pid}").exists():
            _remove_namespaces(f"{PREFIX}{pid}")


def _remove_namespaces(stem: str) -> None:
    """End whatever runs in the namespaces of a cluster, and remove them and their files. What is gone already is no error."""
    for name in _namespaces():
        if not name.startswith(f"{stem}-"):
            continue
        running = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, running.split()):
            if pid != os.getpid():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """An exception, so that the context manager ends."""
    raise SystemExit(128 + number)
