"""Starts the workers under ``horovodrun`` and turns what they report into one test per case.

A launch costs seconds (importing a framework, forming the ring), so all cases of one framework and number of ranks share
one. Cases are functions decorated with ``@case(2, 3)`` (the numbers of ranks) in ``workers/SUITE_*.py``; they are found
by reading the source, since this process imports no framework. Every rank writes one JSON line per case.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launching import WORKERS, horovodrun

LAUNCH_TIMEOUT_SECONDS = 900
#: What each suite needs, and the environment it runs in.
SUITES: dict[str, tuple[str, dict[str, str]]] = {
    "torch": ("torch", {}),
    "tensorflow": ("tensorflow", {}),
    "torchsets": ("torch", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}),
    "tensorflowsets": ("tensorflow", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}),
    "keras": ("tf_keras", {"TF_USE_LEGACY_KERAS": "1"}),
    "keras3": ("keras", {}),
}


@dataclass(frozen=True)
class Case:
    """A case as its source tells: name, numbers of ranks, what it shows."""

    name: str
    ranks: tuple[int, ...]
    shows: str


@dataclass
class Launch:
    """What came out of one ``horovodrun``: results by case and rank, and everything that was printed."""

    output: str
    returncode: int
    results: dict[str, dict[int, str]] = field(default_factory=dict)

    def tail(self) -> str:
        """The end of the output, which holds the traceback of a rank that died."""
        return f"exit code {self.returncode}\n" + "\n".join(self.output.splitlines()[-80:])


def read_cases(suite: str) -> list[Case]:
    """The cases of a suite, in the order in which the workers run them."""
    cases = []
    for path in sorted(WORKERS.glob(f"{suite}_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "case":
                    ranks = tuple(int(ast.literal_eval(argument)) for argument in decorator.args)
                    cases.append(Case(node.name, ranks, ast.get_docstring(node) or ""))
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case and number of ranks, for modules that name a suite."""
    suite = getattr(metafunc.module, "SUITE", None)
    if suite is None or "case" not in metafunc.fixturenames:
        return
    cases = read_cases(suite)
    pairs = [(ranks, case) for ranks in sorted({n for c in cases for n in c.ranks}) for case in cases if ranks in case.ranks]
    metafunc.parametrize(("ranks", "case"), pairs, ids=[f"np{ranks}-{case.name}" for ranks, case in pairs])


class Launches:
    """Starts each launch when its first test asks for it, with the cases that were selected."""

    def __init__(self, items: list[pytest.Item], directory: Path) -> None:
        self._directory = directory
        self._done: dict[tuple[str, int], Launch] = {}
        self._selected: dict[tuple[str, int], list[str]] = {}
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            suite = getattr(getattr(item, "module", None), "SUITE", None)
            if suite is not None and "case" in parameters:
                self._selected.setdefault((suite, parameters["ranks"]), []).append(parameters["case"].name)

    def get(self, suite: str, ranks: int) -> Launch:
        """The launch of a suite with so many ranks."""
        key = (suite, ranks)
        if key not in self._done:
            directory = self._directory / f"{suite}-{ranks}"
            directory.mkdir()
            self._done[key] = launch(suite, ranks, self._selected[key], directory)
        return self._done[key]


def launch(suite: str, ranks: int, names: list[str], directory: Path) -> Launch:
    """Run cases of a suite under ``horovodrun``, and collect what every rank reported."""
    command = [str(WORKERS / "run.py"), suite, str(directory), *names]
    returncode, output = horovodrun(["-np", str(ranks)], command, LAUNCH_TIMEOUT_SECONDS, **SUITES[suite][1])
    done = Launch(output, returncode)
    for rank in range(ranks):
        path = directory / f"rank{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            name, outcome = json.loads(line)
            done.results.setdefault(name, {})[rank] = outcome
    return done


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """All launches of this session."""
    return Launches(request.session.items, tmp_path_factory.mktemp("parallel"))


@pytest.fixture
def outcome(request: pytest.FixtureRequest, launches: Launches, ranks: int, case: Case) -> dict[int, str]:
    """What every rank said about a case: an empty string, or a traceback."""
    suite = request.module.SUITE
    for module in ("horovod", SUITES[suite][0]):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = launches.get(suite, ranks)
    reports = done.results.get(case.name, {})
    missing = [rank for rank in range(ranks) if rank not in reports]
    failed = {rank: text for rank, text in reports.items() if text}
    if failed:
        return failed
    if missing:
        return {rank: f"did not finish {case.name}\n{done.tail()}" for rank in missing}
    return {}
