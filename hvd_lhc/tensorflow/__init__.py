"""Compression for ``horovod.tensorflow``; mirrors ``horovod.tensorflow.compression``.

Usage: ``tape = hvd.DistributedGradientTape(tape, compression=hvd_lhc.tensorflow.Compression.lhc)``
"""

from __future__ import annotations

from hvd_lhc._missing import missing_horovod

try:
    from horovod.tensorflow.compression import Compression as _HorovodCompression

    from hvd_lhc.arguments import ChoiceOfCompressors
    from hvd_lhc.tensorflow.compression import LHC
except ImportError as error:
    raise missing_horovod("tensorflow", error) from error

__all__ = ["LHC", "Compression"]


class Compression(ChoiceOfCompressors):
    """The compressors to choose from; ``none`` and ``fp16`` are Horovod's own."""

    none = _HorovodCompression.none
    fp16 = _HorovodCompression.fp16
    #: Lossless homomorphic compression with default settings: one instance, shared by all who use it.
    lhc = LHC()
