"""The C kernel, as arrays in and arrays out. The only file that touches ``ffi``.

Statuses of the kernel become exceptions here; what a number means is documented in ``csrc/lhc.h``.
The kernel releases the GIL and keeps no state, so all functions may be called from several threads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvd_lhc.errors import ConfigError, DecodeError, LHCError, WireError

try:
    from hvd_lhc._lhc_kernel import ffi, lib
except ImportError as error:  # an uncompiled checkout on the path
    raise ImportError(
        "hvd_lhc's C kernel is not built. Install the package (`pip install .`) instead of importing it from the source tree."
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX_CODES = {"none": int(lib.LHC_INDEX_NONE), "keyed": int(lib.LHC_INDEX_KEYED), "bitmap": int(lib.LHC_INDEX_BITMAP)}
PRECISION_CODES = {"lossless": int(lib.LHC_LOSSLESS), "bounded": int(lib.LHC_BOUNDED)}
FORMAT_CODES = {
    "float32": int(lib.LHC_FLOAT32),
    "float16": int(lib.LHC_FLOAT16),
    "bfloat16": int(lib.LHC_BFLOAT16),
}
SCALE_NAMES = {int(lib.LHC_SCALE_SUM): "sum", int(lib.LHC_SCALE_AVERAGE): "average", int(lib.LHC_SCALE_OTHER): "other"}

#: Status of the kernel -> ``DecodeError.reason``.
_REASONS = {
    int(lib.LHC_ERR_NOT_FINITE): "not_finite",
    int(lib.LHC_ERR_NOT_LINEAR): "not_linear",
    int(lib.LHC_ERR_NOT_INTEGER): "not_integer",
    int(lib.LHC_ERR_CHECKSUM): "checksum",
    int(lib.LHC_ERR_NONFINITE): "nonfinite",
    int(lib.LHC_ERR_OVERFLOW): "overflow",
    int(lib.LHC_ERR_OVER_CAPACITY): "over_capacity",
    int(lib.LHC_ERR_INEXACT): "inexact",
    int(lib.LHC_ERR_HEADER_ONLY): "header_only",
    int(lib.LHC_ERR_PARITY): "parity",
    int(lib.LHC_ERR_UNPEELED): "unpeeled",
    int(lib.LHC_ERR_COUNT): "count",
}
_WIRE_ERRORS = {int(lib.LHC_ERR_WIRE_SIZE), int(lib.LHC_ERR_OTHER_PLAN)}
#: What to do about a plan the kernel refuses; every message names the field to change.
_PLAN_ADVICE = {
    int(lib.LHC_ERR_COUNT_RANGE): "split the tensor, or lower world_size",
    int(lib.LHC_ERR_INDEX_LANES): "raise capacity or block, lower world_size, or use index='bitmap'",
    int(lib.LHC_ERR_WIRE_RANGE): "lower capacity or block",
}


class RawHeader(NamedTuple):
    """The header of a reduced wire as the kernel gives it; field by field as in ``lhc_header``."""

    participants: int
    scale: str
    factor: float
    nonzero_elements: int
    nonzero_keys: int
    nonfinite: int
    overflow: int
    inexact: int
    inexact_single: int
    over_capacity: int
    nonzero_probe_blocks: int
    content: int
    magnitude_exponent: int | None


@dataclass(frozen=True)
class Layout:
    """A validated plan and what follows from it; sizes count float64 numbers, exponents are powers of two."""

    wire_size: int
    header_size: int
    bitmap_size: int
    key_count: int
    cell_count: int
    cell_stride: int
    segments: int
    segment_bits: int
    cell_bits: int
    value_bits: int
    index_lanes: int
    low_bits: int
    unit_exponent: int
    pointer: Any  # lhc_layout *

    def __reduce__(self) -> Any:
        raise TypeError("a Layout holds memory of the C kernel; pickle the Plan and make the layout again")


def plan_layout(
    *,
    numel: int,
    world_size: int,
    capacity: int,
    index: str,
    block: int,
    parts: int,
    exponent: int,
    precision: str,
    seed: int,
    probe_block: int,
) -> Layout:
    """Validate a plan (docs/wire-format.md, section 1) and derive its layout.

    Raises:
        ConfigError: a field, or a combination, that can't be; the message says which to change.
    """
    try:
        plan = ffi.new(
            "lhc_plan *",
            {
                "numel": numel,
                "capacity": capacity,
                "block": block,
                "probe_block": probe_block,
                "seed": seed,
                "world_size": world_size,
                "index": INDEX_CODES[index],
                "parts": parts,
                "precision": PRECISION_CODES[precision],
                "exponent": exponent,
            },
        )
    except OverflowError as error:
        raise ConfigError(f"a field of the plan is out of range: {error}") from None
    layout = ffi.new("lhc_layout *")
    status = lib.lhc_plan_layout(plan, layout)
    if status != lib.LHC_OK:
        advice = _PLAN_ADVICE.get(int(status))
        raise ConfigError(_text(status) + (f"; {advice}" if advice else ""))
    return Layout(
        wire_size=layout.wire_size,
        header_size=layout.header_size,
        bitmap_size=layout.bitmap_size,
        key_count=layout.key_count,
        cell_count=layout.cell_count,
        cell_stride=layout.cell_stride,
        segments=layout.segments,
        segment_bits=layout.segment_bits,
        cell_bits=layout.cell_bits,
        value_bits=layout.value_bits,
        index_lanes=layout.index_lanes,
        low_bits=layout.low_bits,
        unit_exponent=layout.unit_exponent,
        pointer=layout,
    )


def use_isa(name: str) -> None:
    """Use the named instruction set from now on; an empty name is the best one that this processor has.

    Raises:
        ConfigError: there is none of that name here.
    """
    if lib.lhc_use_isa(name.encode()) != lib.LHC_OK:
        raise ConfigError(
            f"HVD_LHC_ISA={name!r}: no such instruction set on this processor or in this build. It may be portable, avx2 or "
            "avx512 (the last two on x86-64); leave it out for the best one."
        )


def isa() -> str:
    """The instruction set in use."""
    return str(ffi.string(lib.lhc_isa_name()).decode("ascii"))


use_isa(os.environ.get("HVD_LHC_ISA", ""))


def encode(layout: Layout, x: NDArray[np.float32], rank: int, wire: NDArray[np.float64]) -> bool:
    """Encode contiguous ``x`` (float32, numel) into contiguous ``wire`` (float64, wire_size); rank -1 is unnamed.

    Returns:
        Does ``x`` hold elements that are -0?
    """
    negative_zeros = ffi.new("int *")
    status = lib.lhc_encode(
        layout.pointer,
        ffi.from_buffer("float[]", x),
        rank,
        ffi.from_buffer("double[]", wire, require_writable=True),
        negative_zeros,
    )
    _check(status, None)
    return bool(negative_zeros[0])


def read_header(layout: Layout, wire: NDArray[np.float64]) -> RawHeader:
    """Read the header of a reduced, contiguous float64 wire."""
    header = ffi.new("lhc_header *")
    status = lib.lhc_read_header(layout.pointer, ffi.from_buffer("double[]", wire), wire.size, header)
    _check(status, None)
    return _raw_header(header)


def decode(
    layout: Layout, wire: NDArray[np.float64], format_name: str, y: NDArray[np.float32]
) -> tuple[RawHeader, int, int, str]:
    """Decode a reduced wire into ``y`` (float32, numel): zeros, or what this rank has encoded. It is written to only if verified.

    Returns:
        header, number of distinct keys, and the refusal: status (0 if ``y`` is verified) with its text. A wire whose
        header could be read comes back with its refusal rather than raising, as callers need both.

    Raises:
        WireError: not this plan's wire.
        DecodeError: the header itself can't be trusted.
    """
    header = ffi.new("lhc_header *")
    valid = ffi.new("int *")
    union_keys = ffi.new("uint64_t *")
    status = lib.lhc_decode(
        layout.pointer,
        ffi.from_buffer("double[]", wire),
        wire.size,
        FORMAT_CODES[format_name],
        ffi.from_buffer("float[]", y, require_writable=True),
        header,
        valid,
        union_keys,
    )
    if not valid[0] or status == lib.LHC_ERR_MEMORY:
        _check(status, None)
    return _raw_header(header), int(union_keys[0]), int(status), _text(status)


def reason_of(status: int) -> str:
    """The ``DecodeError.reason`` of a status that ``decode`` returned."""
    return _REASONS[status]


def _raw_header(header: Any) -> RawHeader:
    magnitude = int(header.magnitude_exponent)
    return RawHeader(
        participants=int(header.participants),
        scale=SCALE_NAMES[int(header.scale_kind)],
        factor=float(header.factor),
        nonzero_elements=int(header.nonzero_elements),
        nonzero_keys=int(header.nonzero_keys),
        nonfinite=int(header.nonfinite),
        overflow=int(header.overflow),
        inexact=int(header.inexact),
        inexact_single=int(header.inexact_single),
        over_capacity=int(header.over_capacity),
        nonzero_probe_blocks=int(header.nonzero_probe_blocks),
        content=int(header.content),
        magnitude_exponent=None if magnitude == -(2**31) else magnitude,
    )


def _text(status: int) -> str:
    return str(ffi.string(lib.lhc_status_text(status)).decode("ascii"))


def _check(status: int, header: None) -> None:
    if status == lib.LHC_OK:
        return
    text = _text(status)
    if status == lib.LHC_ERR_MEMORY:
        raise MemoryError(f"hvd_lhc kernel: {text}")
    if int(status) in _WIRE_ERRORS:
        raise WireError(text)
    if int(status) in _REASONS:
        raise DecodeError(text, reason=_REASONS[int(status)], header=header)
    raise LHCError(f"hvd_lhc kernel: {text} (status {int(status)}); this is a bug, please report it")
