"""What the cases with dynamic process sets share: ranks start without any set."""

from __future__ import annotations

import horovod.torch as hvd
from torch_common import meet

__all__ = ["meet", "start"]


def start() -> int:
    """Initialize Horovod; returns the rank."""
    hvd.init()
    return int(hvd.rank())
