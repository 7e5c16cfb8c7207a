"""A job in which one rank dies or raises in the middle of a step: ``broken_job.py FRAMEWORK HOW DIRECTORY``.

The other ranks write how it ended for them, and after how many seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from exact import draw_gradients

NUMEL, STEPS, LAST_STEP = 50_000, 20, 7


def reducer(framework: str) -> tuple[Any, Any]:
    """Horovod, and what reduces an array: compressed, in a case with a retry."""
    if framework == "torch":
        import horovod.torch as hvd_torch
        import torch

        from hvd_lhc.torch import Compression as TorchCompression

        torch.set_num_threads(1)

        def reduce_torch(array: Any) -> None:
            compression = TorchCompression.lhc
            hvd_torch.allreduce(torch.from_numpy(array), compression=compression, name="broken", op=hvd_torch.Sum)

        return hvd_torch, reduce_torch
    import horovod.tensorflow as hvd_tensorflow
    import tensorflow as tf

    from hvd_lhc.tensorflow import Compression as TensorFlowCompression

    @tf.function  # type: ignore[untyped-decorator]
    def reduce_tensorflow(tensor: Any) -> Any:
        return hvd_tensorflow.allreduce(tensor, compression=TensorFlowCompression.lhc, op=hvd_tensorflow.Sum)

    return hvd_tensorflow, lambda array: reduce_tensorflow(tf.constant(array))


def main(framework: str, how: str, directory: str) -> None:
    """Reduce until the last rank breaks off."""
    hvd, reduce = reducer(framework)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    began = time.monotonic()
    try:
        for step in range(STEPS):
            array = draw_gradients(("broken", step), NUMEL, 100, size)[rank]
            if step == LAST_STEP:
                began = time.monotonic()
                array[:] = 1 if how == "in a retry" else array  # more than the wire can hold: a dense reduction follows
                if rank == size - 1:
                    break_off(how, reduce, array)
            reduce(np.ascontiguousarray(array))
        ended = "finished"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    (Path(directory) / f"rank{rank}").write_text(f"{time.monotonic() - began:.1f}\n{ended}")
    os._exit(1)


def break_off(how: str, reduce: Any, array: Any) -> None:
    """End this rank: at once, by an exception of the user's, or between a sketch and the dense reduction that follows it."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raised":
        raise ValueError("a user's mistake on one rank")
    from hvd_lhc.compressor import Engine

    finish = Engine.finish

    def finish_and_die(*arguments: Any) -> Any:
        finish(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    Engine.finish = finish_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
