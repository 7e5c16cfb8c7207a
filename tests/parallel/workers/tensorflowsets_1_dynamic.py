"""Process sets that are added while a job runs, with ``horovod.tensorflow``: in a mode of Horovod's that has to be asked for."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
from exact import draw_gradients
from harness import case
from steps import integer_steps
from tensorflow_common import MODES, check_steps

from hvd_lhc.tensorflow import LHC

NUMEL = 50_000


@case(3)
def dynamic_process_set() -> None:
    """A process set that is added while the job runs, and removed again: retries stay within it."""
    pair = hvd.add_process_set([1, 2])
    try:
        for mode in MODES if pair.included() else ():
            steps = [draw_gradients(("dynamic", step), NUMEL, 100, 2) for step in range(5)]
            steps[3][1][0] = np.nan
            happened = check_steps(f"dynamic pair {mode}", steps, LHC(process_set=pair), hvd.Sum, mode, pair)
            assert happened == ["probe", "sketch", "sketch", "nonfinite", "sketch"], happened
    finally:
        hvd.remove_process_set(pair)
    check_steps("all again", integer_steps("all again", NUMEL, [100] * 3), LHC(), hvd.Sum)
