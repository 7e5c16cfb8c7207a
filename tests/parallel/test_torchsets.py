"""Dynamic process sets of ``horovod.torch``: every case of ``workers/torchsets_*.py`` passes on every rank."""

from __future__ import annotations

import pytest

SUITE = "torchsets"


def test_case_on_every_rank(outcome: dict[int, str]) -> None:
    """What the docstring of the case in ``workers/torchsets_*.py`` says holds on every rank."""
    if outcome:
        pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in sorted(outcome.items())), pytrace=False)
