"""Elastic jobs: a rank is killed, others come; all that are there at the end have the weights that the steps add up to."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from launching import WORKERS, horovodrun

#: Names of this machine that horovodrun takes for different hosts: a host on which a rank failed is not used again.
FIRST, SECOND, THIRD = "localhost", "127.0.0.1", "127.1"
TIMEOUT_SECONDS = 300
#: A rank may wait for a dead one as long as this; and so long for a new one, which has to import its framework first.
GLOO_TIMEOUT_SECONDS = 45


def run_elastic(
    framework: str,
    directory: Path,
    ranks: int,
    hosts: dict[str, int],
    after: dict[str, int] | None = None,
    coming: dict[str, int] | None = None,
) -> list[dict[str, object]]:
    """Run an elastic job in which a rank on the second host is killed; returns what ranks ended with.

    Args:
        framework: torch or tensorflow.
        directory: for the job's files.
        ranks: to begin with.
        hosts: and their slots, at the beginning.
        after: the same from the moment on in which a rank is killed, if others.
        coming: the same from some steps later on.
    """
    for name, content in {"hosts": hosts, "hosts-after-the-crash": after, "hosts-that-come": coming}.items():
        if content is not None:
            (directory / name).write_text("".join(f"{host}:{slots}\n" for host, slots in content.items()))
    script = directory / "discover.sh"
    script.write_text(f'#!/bin/sh\ncat "{directory}/hosts"\n')
    script.chmod(0o755)
    options = ["-np", str(ranks), "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(script)]
    options += ["--elastic-timeout", "60"]
    status, output = horovodrun(
        options,
        [str(WORKERS / f"elastic_{framework}.py")],
        TIMEOUT_SECONDS,
        ELASTIC_DIRECTORY=str(directory),
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(GLOO_TIMEOUT_SECONDS),
        HOST_THAT_CRASHES=SECOND,
    )
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("result-*.json"))]
    assert status == 0 and results, f"exit status {status}\n" + "\n".join(output.splitlines()[-60:])
    return results


def sizes(result: dict[str, object]) -> list[int]:
    """The numbers of ranks of all steps, without repetition."""
    history: list[list[int]] = result["history"]  # type: ignore[assignment]
    assert [step for step, _ in history] == list(range(40))
    numbers = [size for _, size in history]
    return [number for i, number in enumerate(numbers) if not i or number != numbers[i - 1]]


def check(results: list[dict[str, object]], ranks: int) -> None:
    """All ranks that were there at the end have the right weights, and went on compressing."""
    assert len(results) == ranks, results
    assert all(result["right"] for result in results), results
    assert len({str(result["weights"]) for result in results}) == 1
    assert all(int(str(result["sketches"])) >= 5 for result in results), results


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_killed_then_another_comes(framework: str, tmp_path: Path) -> None:
    """Two ranks, one is killed, one goes on alone, and another comes."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    results = run_elastic(framework, tmp_path, 2, {FIRST: 1, SECOND: 1}, coming={FIRST: 1, THIRD: 1})
    check(results, 2)
    assert sizes(results[0]) == [2, 1, 2], results


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_killed_and_replaced_at_once(framework: str, tmp_path: Path) -> None:
    """Three ranks, and three again: two that have learned from many steps, and one that knows nothing."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    after = {FIRST: 2, THIRD: 1}
    results = run_elastic(framework, tmp_path, 3, {FIRST: 2, SECOND: 1}, after)
    check(results, 3)
    assert sizes(results[0])[0] == 3 and sizes(results[0])[-1] == 3, results
