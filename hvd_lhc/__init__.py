"""hvd_lhc: lossless homomorphic compression of sparse gradients for Horovod.

In a training script, one argument is all::

    import hvd_lhc.torch          # or hvd_lhc.tensorflow
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd_lhc.torch.Compression.lhc)

The names here are the core, which needs NumPy only: :class:`Plan`, :class:`Codec` and the exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_lhc._version import __version__
from hvd_lhc.errors import ConfigError, DecodeError, InstallError, LHCError, UnsupportedError, WireError

if TYPE_CHECKING:
    from hvd_lhc.codec import Codec, Header
    from hvd_lhc.plan import Plan

__all__ = [
    "Codec",
    "ConfigError",
    "DecodeError",
    "Header",
    "InstallError",
    "LHCError",
    "Plan",
    "UnsupportedError",
    "WireError",
    "__version__",
]

_LAZY = {"Codec": "hvd_lhc.codec", "Header": "hvd_lhc.codec", "Plan": "hvd_lhc.plan"}


def __getattr__(name: str) -> Any:
    """Load the core on first use, so that ``python -m hvd_lhc`` works before the kernel is built."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hvd_lhc' has no attribute {name!r}")
