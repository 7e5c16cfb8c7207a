"""Train two models with and without lossless compression, and compare. ``make demo`` runs this.

    python examples/demo.py [--quick] [--only pytorch|tensorflow]

Each model is trained twice under ``horovodrun``, with ``none`` and with ``lhc``, from the same
seed. With two ranks the final weights must be the same to the last bit; the exit status says
whether they were. (With more ranks an uncompressed allreduce rounds after every addition, in an
order that may change, whereas lhc rounds once: then the table just says whether they agree.)
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import positive_int
from movielens import DatasetError, fetch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
COMPRESSIONS = ("none", "lhc")

#: horovodrun marks what a rank writes: ``[0]<stdout>:text``.
RANK_PREFIX = re.compile(r"^\[(\d+)\]<(stdout|stderr)>:")

#: Lines of each rank's log shown after a failure.
LOG_TAIL = 20

#: What a terminal understands as: go to the start of the line, and empty it.
ERASE_LINE = "\r\x1b[K"

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    # A rank that waits for another one this long ends the job, instead of waiting forever.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",
}


@dataclass(frozen=True)
class Example:
    """A script to run, and what to show of its results."""

    title: str
    script: str
    flags: tuple[str, ...]
    quick_flags: tuple[str, ...]
    metric: str


EXAMPLES = {
    "pytorch": Example(
        title="PyTorch: neural collaborative filtering, MovieLens-100K",
        script="pytorch_ncf.py",
        flags=("--epochs", "2", "--steps", "4600"),
        quick_flags=("--epochs", "1", "--steps", "300"),
        metric="HR@10",
    ),
    "tensorflow": Example(
        title="TensorFlow: next-word model, Python's help topics",
        script="tensorflow2_text.py",
        flags=("--epochs", "3"),
        quick_flags=("--epochs", "1", "--steps", "60"),
        metric="perplexity",
    ),
}


class RunError(Exception):
    """A training run failed."""


def main() -> int:
    """Run what the flags ask for; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=positive_int, default=2, help="processes to train with")
    parser.add_argument("--only", choices=sorted(EXAMPLES), help="run one of the models")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    args = parser.parse_args()

    console = Console()
    chosen = [args.only] if args.only else list(EXAMPLES)
    results: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    for name in chosen:
        example = EXAMPLES[name]
        console.rule(example.title)
        try:
            if name == "pytorch":
                fetch()
            results[name] = {c: train(example, c, args.ranks, args.quick) for c in COMPRESSIONS}
        except (DatasetError, RunError) as error:
            console.out(f"{name}: {error}", style="red", highlight=False)
            failures.append(f"{name}: a run failed")
            continue
        console.print(comparison(example, results[name]))
        if not identical(results[name]) and args.ranks <= 2:
            failures.append(f"{name}: the final weights differ between none and lhc")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    for failure in failures:
        console.print(f"FAILED  {failure}", style="bold red", highlight=False)
    return 1 if failures else 0


def train(example: Example, compression: str, ranks: int, quick: bool) -> dict[str, Any]:
    """Run one training under horovodrun, with its progress on this terminal.

    Returns the record that the example wrote. Raises RunError, with the end of the log, when the
    run fails or its ranks end up with different weights.
    """
    with tempfile.TemporaryDirectory(prefix="hvd-lhc-demo-") as scratch:
        record = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks)]
        command += [sys.executable, str(HERE / example.script), "--compression", compression]
        command += [*(example.quick_flags if quick else example.flags), "--json", str(record)]
        command += ["--progress" if sys.stderr.isatty() else "--no-progress"]
        status, log = launch(command)
        if status != 0 or not record.exists():
            raise RunError(f"{example.script} --compression {compression} failed, status {status}:\n{tail(log)}")
        result: dict[str, Any] = json.loads(record.read_text())
    if not result["ranks_agree"]:
        raise RunError(f"{example.script} --compression {compression}: the ranks' weights differ")
    return result


def launch(command: list[str]) -> tuple[int, list[str]]:
    """Run a command, pass on what rank 0 has to say; return the exit status and all ranks' lines."""
    size = shutil.get_terminal_size()
    # The progress bar can't see the terminal through horovodrun's pipes. Leave room to be safe.
    shape = {"COLUMNS": str(min(size.columns, 100)), "LINES": str(size.lines)}
    log: list[str] = []
    with subprocess.Popen(
        command,
        env={**os.environ, **QUIET, **shape},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for text, end in lines(process.stdout.fileno()):
            mark = RANK_PREFIX.match(text)
            text = RANK_PREFIX.sub("", text)
            if end == "\n":
                log.append(f"[rank {mark[1]}] {text}" if mark else text)
            if mark and mark[1] == "0":
                show(text, end, mark[2])
    return process.returncode, log


def tail(log: list[str]) -> str:
    """Return the end of what each rank wrote, one rank after the other; failing that, of all."""
    ranks: dict[str, list[str]] = {}
    for line in log:
        if line.startswith("[rank "):
            ranks.setdefault(line.split("]")[0], []).append(line)
    return "\n".join(line for part in ranks.values() or [log] for line in part[-LOG_TAIL:])


def lines(descriptor: int) -> Iterator[tuple[str, str]]:
    """Yield lines and their ends as they come; a progress bar ends its lines with a carriage return."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    while data := os.read(descriptor, 4096):
        *parts, rest = re.split("([\r\n])", rest + decoder.decode(data))
        yield from zip(parts[::2], parts[1::2], strict=True)
    if rest:
        yield rest, "\n"


def show(text: str, end: str, stream: str) -> None:
    """Pass on what a person wants to see: printed lines, and the progress bar, which is on stderr.

    Other lines on stderr (start-up messages of libraries) are only in the log.
    """
    terminal = sys.stderr.isatty()
    if stream == "stdout" and end == "\n":
        if terminal:
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)
        print(text, flush=True)
    elif stream == "stderr" and end == "\r" and terminal:
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


def identical(results: dict[str, dict[str, Any]]) -> bool:
    """Return whether all runs ended with the same bits in all weights."""
    return len({result["weights_sha256"] for result in results.values()}) == 1


def comparison(example: Example, results: dict[str, dict[str, Any]]) -> Table:
    """Return the table that sets the runs of one model side by side."""
    plain = results["none"]
    title = f"{example.script.removesuffix('.py')}, {plain['ranks']} ranks, {plain['steps']:,} steps"
    table = Table(title=title, title_justify="left")
    for column in ("", "ms/step", "bytes/step", "ratio", "loss", example.metric, "final weights"):
        table.add_column(column, justify="right", no_wrap=True)
    for compression, result in results.items():
        verdict = "[green]bit-identical[/]"
        if result["weights_sha256"] != plain["weights_sha256"]:
            verdict = "[red]DIFFERENT[/]" if plain["ranks"] <= 2 else "rounded once"
        table.add_row(
            compression,
            f"{result['step_ms']:.1f}",
            f"{result['wire_bytes_per_step']:,.0f}",
            f"{plain['wire_bytes_per_step'] / result['wire_bytes_per_step']:.1f}x",
            f"{result['final_loss']:.6f}",
            f"{result['metrics'][example.metric]:.4f}",
            result["weights_sha256"][:12] if compression == "none" else verdict,
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
