"""What the user sees during the minutes of a build: a live percentage on a terminal, a line per tenth elsewhere."""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType
from typing import Any

#: ``[ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/mpi_ops_v2.cc.o``, as CMake's makefiles print it.
_STEP = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s*(.*)$")
_OBJECT = re.compile(r"CMakeFiles/([^/]+)\.dir/(?:.*/)?([^/]+?)\.o$")


def parse_step(line: str) -> tuple[int, str] | None:
    """Percentage and subject of a line of the build; ``None`` for all other lines."""
    found = _STEP.match(line)
    if found is None:
        return None
    subject = _OBJECT.search(found.group(2))
    return int(found.group(1)), f"{subject.group(1)}: {subject.group(2)}" if subject else found.group(2).strip()


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


class BuildProgress:
    """Shows lines of a build as they come; a context manager.

    Args:
        verbose: print every line as it is, instead.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._start = time.monotonic()
        self._shown = -1
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> BuildProgress:
        if not self._verbose and sys.stdout.isatty():
            self._bar = _make_bar()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("preparing", total=100)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def feed(self, line: str) -> None:
        """Take one line of the build's output."""
        if self._verbose:
            say(line)
            return
        step = parse_step(line)
        if step is None:
            return
        percent, subject = step
        if self._bar is not None:
            self._bar.update(self._task, completed=percent, description=subject)
        elif percent // 10 > self._shown // 10 or self._shown < 0:
            self._shown = percent
            say(f"  {percent:3d} %  {subject}  ({time.monotonic() - self._start:.0f} s)")


def _make_bar() -> Any:
    """A bar of rich, or ``None`` without rich."""
    try:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    return Progress(BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), transient=True)
