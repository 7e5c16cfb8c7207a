"""Horovod on a cluster of network namespaces: measured side by side, with every alternative a user has.

    sudo python benchmarks/cluster.py run -n 4 --rate 1gbit -- python examples/pytorch_ncf.py --compression lhc
    sudo python benchmarks/cluster.py aggregate [-n 2 4 8] [--rate 1gbit] [--numel 25000000] [--density 0.001 0.01 0.05 0.1]
    sudo python benchmarks/cluster.py clean

``run`` starts a command on every host, with Horovod's environment, and says how many bytes crossed each link. ``aggregate``
reduces one tensor by every method in turn and prints medians. ``clean`` removes what a killed run has left behind (each
start does so too).
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from cluster_jobs import run_job
from hosts import Cluster, ClusterError, remove_leftovers
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("aggregate_worker.py")
SUPPORTS = ("identical", "independent", "identical_rows", "zipf_rows")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="a command on every host")
    run.add_argument("-n", "--hosts", type=int, default=4)
    run.add_argument("--rate", default="1gbit", help="of each link: 100mbit, 1gbit, 10gbit (default 1gbit)")
    run.add_argument("--timeout", type=float, default=3600, help="seconds")
    run.add_argument("program", nargs=argparse.REMAINDER, help="after --")
    aggregate = commands.add_parser("aggregate", help="one tensor, every method")
    aggregate.add_argument("-n", "--hosts", type=int, nargs="+", default=[4])
    aggregate.add_argument("--rate", nargs="+", default=["1gbit"])
    aggregate.add_argument("--numel", type=int, nargs="+", default=[25_000_000])
    aggregate.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.05, 0.1])
    aggregate.add_argument("--support", nargs="+", choices=SUPPORTS, default=list(SUPPORTS))
    aggregate.add_argument("--repeats", type=int, default=5)
    aggregate.add_argument("--timeout", type=float, default=3600, help="seconds, for each cluster")
    aggregate.add_argument("--json", type=Path, help="write results there")
    commands.add_parser("clean", help="remove what a killed run has left behind")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """``cluster.py run``."""
    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        raise ClusterError("no command: write it after --, as in: cluster.py run -n 4 -- python train.py")
    with Cluster(options.hosts, options.rate) as cluster:
        done = run_job(cluster, command, timeout=options.timeout, show=True)
    if done.status:
        for rank, text in enumerate(done.output):
            sys.stderr.write("".join(f"[{rank}] {line}\n" for line in text.splitlines()[-30:]))
    print(f"{options.hosts} hosts, links of {options.rate}: {done.seconds:.1f} s, exit status {done.status}")
    for rank, sent in enumerate(done.bytes_sent):
        print(f"  host {rank} sent {sent:,} bytes")
    return done.status


def aggregate(options: argparse.Namespace) -> int:
    """``cluster.py aggregate``."""
    results: list[dict[str, Any]] = []
    cases = [
        {"numel": numel, "density": density, "support": support}
        for numel, support, density in product(options.numel, options.support, options.density)
    ]
    for hosts, rate in product(options.hosts, options.rate):
        with Cluster(hosts, rate) as cluster:
            request = json.dumps({"cases": cases, "repeats": options.repeats})
            done = run_job(cluster, [sys.executable, str(WORKER), request], timeout=options.timeout)
        found = [json.loads(line[7:]) for line in done.output[0].splitlines() if line.startswith("RESULT ")]
        if done.status or len(found) != len(cases):
            raise ClusterError(f"exit status {done.status} after {len(found)} of {len(cases)} cases\n" + done.output[0][-3000:])
        results += [{"rate": rate, **result} for result in found]
        print_table(hosts, rate, found)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def print_table(hosts: int, rate: str, results: list[dict[str, Any]]) -> None:
    """Seconds, what they are against no compression, and megabytes sent by a host, for every method."""
    table = Table(title=f"{hosts} hosts, links of {rate}: seconds (times as fast as none; megabytes sent by a host)")
    names = list(results[0]["methods"])
    for column in ("elements", "support", "union", *names):
        table.add_column(column, justify="left" if column == "support" else "right")
    for result in results:
        none = result["methods"]["none"]["seconds"]
        cells = []
        for name in names:
            one = result["methods"][name]
            inexact = "" if one["largest_error"] == 0 or name == "none" else " ~"
            cells.append(f"{one['seconds']:.4f} ({none / one['seconds']:.1f}; {one['bytes'] / 1e6:.1f}){inexact}")
        table.add_row(f"{result['numel']:,}", result["support"], f"{100 * result['union_density']:.2f} %", *cells)
    Console(width=max(150, Console().width)).print(table)
    print("~: not the exact sum, rounded to float32 (none isn't either, with more than two ranks)")


def main() -> int:
    """Do what the command line says."""
    options = parse_arguments()
    try:
        if options.command == "clean":
            remove_leftovers()
            return 0
        return run(options) if options.command == "run" else aggregate(options)
    except ClusterError as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
