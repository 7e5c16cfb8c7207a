"""A rank dies or raises in the middle of a step: the others get Horovod's error, and nobody waits for ever."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from launching import WORKERS, horovodrun

TIMEOUT_SECONDS = 150
#: Of Horovod, after which a rank gives up on one that doesn't answer.
GLOO_TIMEOUT_SECONDS = 30


@pytest.mark.parametrize("how", ["killed", "raised", "in a retry"])
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_others_end_with_an_error(framework: str, how: str, tmp_path: Path) -> None:
    """Every other rank's call raises Horovod's error, within its timeout."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    command = [str(WORKERS / "broken_job.py"), framework, how, str(tmp_path)]
    status, output = horovodrun(
        ["-np", "2"], command, TIMEOUT_SECONDS, HOROVOD_GLOO_TIMEOUT_SECONDS=str(GLOO_TIMEOUT_SECONDS)
    )
    assert status not in (0, None), output
    report = tmp_path / "rank0"
    assert report.exists(), f"rank 0 said nothing\n{output}"
    seconds, ended = report.read_text().split("\n", 1)
    assert "Horovod has been shut down" in ended or "HorovodInternalError" in ended, ended
    assert float(seconds) < GLOO_TIMEOUT_SECONDS + 15, f"after {seconds} s: {ended}"
