"""What the cases with dynamic process sets share: ranks start without any set."""

from __future__ import annotations

import horovod.tensorflow as hvd
from tensorflow_common import meet

__all__ = ["meet", "start"]


def start() -> int:
    """Initialize Horovod; returns the rank."""
    hvd.init()
    return int(hvd.rank())
