"""What a user may get wrong in the call, in any framework: calls and the words that the answer must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_lhc import ConfigError

__all__ = ["check_wrong_options", "check_wrong_values_of_compression", "expect"]


def expect(call: Callable[[], Any], *words: str) -> None:
    """The call raises ``ConfigError`` with these words in it."""
    message, result = "", None
    try:
        result = call()
    except ConfigError as error:
        message = str(error)
    assert message, f"no ConfigError with {words}, but {result!r}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message}"


def check_wrong_options(lhc: Any) -> None:
    """``LHC(...)`` with options that it hasn't, or hasn't so."""
    expect(lambda: lhc(4), "LHC(4)", "by name", "min_numel=")
    expect(lambda: lhc(4, "lossless"), "LHC(4, 'lossless')", "by name")
    expect(lambda: lhc(ratio=4), "no option 'ratio'", "max_wire_ratio")
    expect(lambda: lhc(min_numels=4), "no option 'min_numels'", "Did you mean min_numel?")
    expect(lambda: lhc(min_numel="1"), "min_numel", "'1'", "whole number", "LHC(min_numel=16384)")
    expect(lambda: lhc(process_set=[0, 1]), "process_set", "[0, 1]", "hvd.ProcessSet")
    expect(lambda: lhc(process_set=0), "process_set", "hvd.ProcessSet")


def check_wrong_values_of_compression(lhc: Any, compression: Any, reduce: Callable[[Any], Any]) -> None:
    """``compression=`` something that is no compressor but stands near one.

    Args:
        lhc: the class ``LHC``.
        compression: the class ``Compression``.
        reduce: calls Horovod with what it is given as ``compression=``.
    """
    expect(lambda: reduce(lhc), "LHC()", "Compression.lhc")
    expect(lambda: reduce(compression), "compression=Compression.lhc")
    expect(lambda: reduce(compression()), "compression=Compression.lhc")

    class Mine(lhc):  # type: ignore[misc]
        def compress(self, tensor: Any) -> Any:
            """As a subclass may call it."""
            return lhc.compress(self, tensor)

    reduce(Mine())
