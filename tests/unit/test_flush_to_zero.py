"""A thread may be set to treat subnormal numbers as zeros; TensorFlow's are. The codec must not lose them."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Run by itself, so that no other test has its subnormal numbers flushed.
PROGRAM = """
import numpy as np
import torch
from hvd_lhc import Codec, Plan

assert torch.set_flush_denormal(True)
x = np.zeros(8, np.float32)
x.view(np.uint32)[:4] = [5, 0x80000007, 0x007FFFFF, 0x00800001]
assert float((torch.tensor(1e-38) / 2).item()) == 0, "flushing is not on"
for parts in (1, 2):
    codec = Codec(Plan(numel=8, world_size=3, capacity=8, exponent={exponent}, parts=parts))
    total = sum(codec.encode(x if rank < 2 else 0 * x, rank=rank) for rank in range(3)) * {scale}
    print(codec.decode(total).view(np.uint32)[:4].tolist())
"""


def flushed(exponent: int, scale: str) -> list[str]:
    """What comes out of a program of which every thread flushes."""
    program = PROGRAM.format(exponent=exponent, scale=scale)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split("\n")[:2]


@pytest.mark.parametrize("exponent", [-110, -120])
def test_subnormal_gradients_are_summed_like_others(exponent: int) -> None:
    """Twice the numbers, in one part and in two."""
    assert flushed(exponent, "1") == [str([10, 0x8000000E, 0x00FFFFFE, 0x01000001])] * 2


def test_subnormal_averages_are_rounded_like_others() -> None:
    """Two thirds of the numbers, to the nearest: 10 / 3 is 3, 14 / 3 is 5."""
    assert flushed(-110, "(1 / 3)")[0].startswith(str([3, 0x80000005, 5592405])[:-1])
