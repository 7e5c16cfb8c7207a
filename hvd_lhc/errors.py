"""Every exception that hvd_lhc raises on purpose.

One tree, so that ``except LHCError`` catches them all:

* :class:`ConfigError`: a plan or an option that can't work; the message says which number to change.
* :class:`WireError`: the array handed in isn't this plan's wire (size, dtype, made under another plan).
* :class:`DecodeError`: the wire can't be decoded *and verified*; ``reason`` names the check that failed.
* :class:`UnsupportedError`: a feature of Horovod or a framework that can't carry sketches.
* :class:`InstallError`: ``python -m hvd_lhc install-horovod`` can't go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_lhc.codec import Header

__all__ = [
    "ConfigError",
    "DecodeError",
    "InstallError",
    "LHCError",
    "UnsupportedError",
    "WireError",
]


class LHCError(Exception):
    """Root of all exceptions of hvd_lhc."""

    # TensorFlow's AutoGraph replaces an exception by one of its own unless its class is constructed just as Exception is.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class ConfigError(LHCError, ValueError):
    """A plan or an option is out of range, or a combination of them can't fit."""


class WireError(LHCError, ValueError):
    """The array is not a wire of this plan: its size, its dtype or its fingerprint is another."""


class DecodeError(LHCError):
    """The reduced wire could not be decoded and verified; no gradient is returned.

    Attributes:
        reason: short name of the check that failed, e.g. ``"over_capacity"``, ``"unpeeled"``, ``"parity"``.
        header: the :class:`~hvd_lhc.codec.Header` that was read before the failure, or ``None`` if the header itself is
            not to be trusted.
    """

    def __init__(self, message: str, *, reason: str, header: Header | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.header = header


class UnsupportedError(LHCError):
    """Sketches can't pass through this feature; the message says why and what to write instead."""


class InstallError(LHCError):
    """Horovod could not be built, installed or proven to work."""
