"""A gradient of more than 2**32 elements. Its zeros are pages that nobody wrote, so that it takes little memory."""

from __future__ import annotations

import numpy as np

from hvd_lhc import Codec, Plan


def test_elements_beyond_2_to_32_decode_in_their_places() -> None:
    """Neighbours of 2**32 and the last element are told apart and summed exactly."""
    numel = 2**32 + 12_345
    codec = Codec(Plan(numel=numel, world_size=2, capacity=8000, exponent=4))
    places = [5, 77, 2**32 - 1, 2**32, numel - 1]
    x = np.zeros(numel, np.float32)
    x[places] = [1, 0, 2, 3.25, -7]
    wire = codec.encode(x, rank=0)
    x[places] = [0, 1, 0, 0.5, 0]
    wire += codec.encode(x, rank=1)
    del x
    total = codec.decode(wire)
    assert total[places].tolist() == [1, 1, 2, 3.75, -7]
    assert np.count_nonzero(total[:100]) == 2
