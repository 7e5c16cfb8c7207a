"""What documents say about the code is true of the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_features_names_tests_that_exist() -> None:
    """Every test that docs/horovod.md names for a feature is a case of the parallel tests, or a file of them."""
    workers = ROOT / "tests" / "parallel" / "workers"
    cases = {name for path in workers.glob("*.py") for name in re.findall(r"^def (\w+)\(\)", path.read_text(), re.MULTILINE)}
    files = {path.stem for path in workers.glob("*.py")} | {path.name for path in workers.parent.glob("*.py")}
    rows = [line for line in (ROOT / "docs" / "horovod.md").read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[-2])}
    assert len(named) > 60
    assert named - cases - files - {"compress"} == set()


def test_links_between_documents() -> None:
    """Files that the documents link to exist."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
