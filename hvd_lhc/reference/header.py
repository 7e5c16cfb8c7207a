"""Sections 6 and 7, steps 1 and 2: the scale of a reduction, and what the header of its wire says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from hvd_lhc.errors import DecodeError, WireError
from hvd_lhc.reference.encode import checksum
from hvd_lhc.reference.layout import CHECKSUM, HEADER_FIELDS, MAGNITUDE_CLASSES, PILOTS, Geometry, PlanLike, geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["ReferenceHeader", "digits_of", "read_header", "refuse", "unscaled_integer"]

EPSILON = Fraction(1, 2**38)


@dataclass(frozen=True)
class ReferenceHeader:
    """The fields of :class:`hvd_lhc.codec.Header`, but with an exact ``factor``."""

    participants: int
    scale: str
    factor: Fraction
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


def refuse(reason: str, message: str, header: ReferenceHeader | None = None) -> NoReturn:
    """Raise DecodeError."""
    raise DecodeError(message, reason=reason, header=cast("Any", header))


def _close(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= EPSILON * abs(b)


def _some_ranks(n: int, p0: Fraction, p1: Fraction, p2: Fraction, p3: Fraction) -> int | None:
    """How many distinct ranks these pilots (already multiplied by phi) describe, or None (step 3)."""
    m, a, q = round(p0), round(-p2), round(p1)
    plausible = (
        _close(p0, Fraction(m))
        and _close(-p2, Fraction(a))
        and _close(p1, Fraction(q))
        and (_close(p3, Fraction(n)) or abs(p3) <= EPSILON * n)
        and 1 <= m < n
        and m * (m + 1) <= 2 * a <= 2 * m * n - m * (m - 1)
        and (m * q - a * a == 0 if m == 1 else 12 * (m * q - a * a) >= m**2 * (m**2 - 1))
        and q <= m * n**2
        and a % 2 == q % 2
    )
    return m if plausible else None


def _read_scale(plan: PlanLike, g: Geometry, wire: NDArray[np.float64]) -> tuple[int, str, Fraction]:
    """Participants, scale and factor."""
    n = plan.world_size
    p0, p1, p2, p3 = (Fraction(float(wire[p])) / g.pilot_unit for p in range(PILOTS))
    # two binary64 divisions, as the document writes it
    factor = Fraction(float(wire[0]) / float(g.pilot_unit) / float(n))
    if p0 > 0 and factor > 0:
        square, negative = p0 * (n + 1) * (2 * n + 1) / 6, p0 * (n + 1) / 2
        if _close(p1, square) and _close(-p2, negative) and _close(p3, p0):
            if _close(p0 / n, Fraction(1)):
                return n, "sum", Fraction(1)
            if _close(p0, Fraction(1)):
                return n, "average", Fraction(1, n)
            return n, "other", factor
        for phi, scale, factor in ((1, "sum", Fraction(1)), (n, "average", Fraction(1, n))):
            participants = _some_ranks(n, phi * p0, phi * p1, phi * p2, phi * p3)
            if participants is not None:
                return participants, scale, factor
    return refuse(
        "not_linear",
        f"the pilots {wire[:3].tolist()} are not those of a sum over {n} ranks; reduce with op=Sum or op=Average",
    )


def unscaled_integer(
    z: float, scale: str, factor: Fraction, where: int, header: ReferenceHeader | None = None
) -> int:
    """The integer that number ``where`` of the wire stands for (end of section 6)."""
    unscaled = z  # one operation in binary64, as the document writes it
    if scale == "average":
        unscaled = z * float(factor.denominator)
    elif scale == "other":
        unscaled = z / float(factor)
    if not math.isfinite(unscaled):
        refuse("not_finite", f"number {where} of the wire is {z}", header)
    nearest = round(Fraction(unscaled))
    if abs(Fraction(unscaled) - nearest) > Fraction(1, 4) or abs(unscaled) >= 2**53:
        refuse("not_integer", f"number {where} of the wire, {z} / {factor}, is not an integer below 2^53", header)
    return nearest


def digits_of(plan: PlanLike, g: Geometry, cells: Sequence[int], count: int, participants: int) -> list[int] | None:
    """The ``count`` digits in these cells; None if they are none: above ``participants``, or beyond ``count``."""
    digits: list[int] = []
    for cell in cells:
        if not 0 <= cell < (plan.world_size + 1) ** g.digits_per_cell:
            return None
        for _ in range(g.digits_per_cell):
            digits.append(cell % (plan.world_size + 1))
            cell //= plan.world_size + 1
    if max(digits) > participants or any(digits[count:]):
        return None
    return digits[:count]


def _counts_are_possible(plan: PlanLike, g: Geometry, fields: Sequence[int], participants: int) -> bool:
    """Section 7, step 2: no count is negative, or larger than so many ranks can make it."""
    elements, keys, over_capacity, probe_blocks = (fields[p] for p in (5, 6, 11, 12))
    return (
        min(fields[5:]) >= 0
        and elements <= plan.numel * participants
        and keys <= g.keys * participants
        and over_capacity <= participants
        and probe_blocks <= elements
    )


def read_header(plan: PlanLike, wire: NDArray[np.float64]) -> ReferenceHeader:
    """Steps 1 and 2 of section 7: what the reduced wire's header says.

    Args:
        plan: shared by all ranks.
        wire: float64, shape ``(wire_size(plan),)``.

    Raises:
        ConfigError: the plan is invalid.
        WireError: another size, dtype or fingerprint.
        DecodeError: ``not_finite``, ``not_linear``, ``not_integer``, ``checksum`` or (magnitude digits) ``count``.
    """
    g = geometry(plan)
    if wire.dtype != np.float64 or wire.shape != (g.wire_size,):
        raise WireError(f"this plan's wire is float64 of shape ({g.wire_size},), got {wire.dtype} of {wire.shape}")
    numbers = wire[: g.header_size].tolist()
    for p, z in enumerate(numbers):
        if not math.isfinite(z):
            refuse("not_finite", f"number {p} of the wire is {z}")
    participants, scale, factor = _read_scale(plan, g, wire)
    fields = [0] * PILOTS  # they have been looked at
    fields += [unscaled_integer(z, scale, factor, p) for p, z in enumerate(numbers) if p >= PILOTS]
    if fields[PILOTS] != participants * g.fingerprint:
        raise WireError("the wire was encoded under another plan (its fingerprint is another); share one plan")
    if (checksum(g, fields) - fields[CHECKSUM]) % 2**g.checksum_bits != 0:
        refuse("checksum", "the header's checksum is wrong")
    classes = digits_of(plan, g, fields[HEADER_FIELDS:], MAGNITUDE_CLASSES, participants)
    if classes is None or not _counts_are_possible(plan, g, fields, participants):
        refuse("count", "the header has counts that no sum of ranks can have")
    highest = max((j for j, ranks in enumerate(classes) if ranks), default=None)
    return ReferenceHeader(
        participants=participants,
        scale=scale,
        factor=factor,
        nonzero_elements=fields[5],
        nonzero_keys=fields[6],
        nonfinite=fields[7],
        overflow=fields[8],
        inexact=fields[9],
        inexact_single=fields[10],
        over_capacity=fields[11],
        nonzero_probe_blocks=fields[12],
        content=fields[13],
        magnitude_exponent=None if highest is None else highest - 148,
    )
