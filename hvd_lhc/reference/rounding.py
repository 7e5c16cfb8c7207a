"""Exact numbers and the formats that they are rounded to, once."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["FLOAT_FORMATS", "exact_sum", "round_once", "smallest_exponent"]

# significant bits, exponent of the smallest normal number, exponent of the largest
FLOAT_FORMATS = {"float32": (24, -126, 127), "float16": (11, -14, 15), "bfloat16": (8, -126, 127)}


def smallest_exponent(x: Fraction) -> int:
    """The smallest e with |x| < 2^e, x not zero."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    while abs(x) >= Fraction(2) ** e:
        e += 1
    while abs(x) < Fraction(2) ** (e - 1):
        e -= 1
    return e


def round_once(value: Fraction, dtype: str) -> float:
    """The nearest number of a format, ties to even, with subnormals; infinite beyond its range; zero is +0.

    Args:
        value: exact.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """
    precision, smallest, largest = FLOAT_FORMATS[dtype]
    if value == 0:
        return 0.0
    exponent = max(smallest_exponent(value) - 1, smallest)  # 2^exponent <= |value|, where it is normal
    spacing = exponent - (precision - 1)
    multiple = round(abs(value) / Fraction(2) ** spacing)  # Fraction rounds ties to even
    if multiple == 0:
        return 0.0
    if multiple * Fraction(2) ** spacing >= Fraction(2) ** (largest + 1):
        return math.copysign(math.inf, value)
    return math.copysign(math.ldexp(multiple, spacing), value)


def exact_sum(xs: Sequence[NDArray[np.float32]], dtype: str = "float32", divisor: int = 1) -> NDArray[np.float32]:
    """The dense oracle: per element the exact sum over ranks, divided by ``divisor``, rounded once.

    Args:
        xs: finite float32 arrays of one shape ``(numel,)``.
        dtype: as in :func:`round_once`.
        divisor: 1 for a sum, the number of ranks for an average.

    Returns:
        float32, shape ``(numel,)``.
    """
    columns = zip(*(x.tolist() for x in xs))
    sums = [round_once(sum((Fraction(v) for v in column), Fraction(0)) / divisor, dtype) for column in columns]
    return np.array(sums, dtype=np.float32)
