"""Gradients to reduce, and what their sum must be: exact rational arithmetic, rounded once. NumPy only.

Every rank makes the gradients of all ranks (from a seed), so that it can compute what must come out.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: name -> bits of the significand, exponent of the least subnormal, exponent of the first number that is too large.
FORMATS = {"float32": (24, -149, 128), "float16": (11, -24, 16), "bfloat16": (8, -133, 128)}

SUPPORTS = ("identical", "disjoint", "nested")
VALUES = ("ordinary", "wild", "subnormal")


def generator(*key: object) -> np.random.Generator:
    """Random numbers that depend on the key alone, the same on every rank."""
    return np.random.default_rng([*repr(key).encode()])


def draw_values(kind: str, count: int, random: np.random.Generator) -> Array:
    """Nonzero float32 values: ``ordinary``, ``integers`` (their sums are exact), ``wild`` (sizes far apart) or ``subnormal``."""
    signs = random.choice([-1.0, 1.0], count)
    if kind == "ordinary":
        values = random.uniform(0.5, 8.0, count)
    elif kind == "integers":
        values = random.integers(1, 1000, count).astype(float)
    elif kind == "wild":
        values = np.ldexp(random.uniform(1.0, 2.0, count), random.integers(-15, 16, count))
    elif kind == "subnormal":
        values = np.ldexp(random.integers(1, 2**23, count).astype(float), -149)
    else:
        raise ValueError(kind)
    return (signs * values).astype(np.float32)


def draw_support(kind: str, numel: int, count: int, ranks: int, random: np.random.Generator) -> list[Array]:
    """For every rank the positions of its nonzeros."""
    order = random.permutation(numel)
    if kind == "identical":
        return [order[:count]] * ranks
    if kind == "disjoint":
        return [order[rank * count : (rank + 1) * count] for rank in range(ranks)]
    if kind == "nested":
        return [order[: count // (rank + 1)] for rank in range(ranks)]
    if kind == "random":
        return [random.choice(numel, count, replace=False) for _ in range(ranks)]
    raise ValueError(kind)


def draw_gradients(
    key: object, numel: int, count: int, ranks: int, support: str = "random", values: str = "integers"
) -> list[Array]:
    """The flat float32 gradients of all ranks, each with up to ``count`` nonzeros."""
    random = generator(key, numel, count, ranks, support, values)
    gradients = []
    for positions in draw_support(support, numel, count, ranks, random):
        gradient = np.zeros(numel, np.float32)
        gradient[positions] = draw_values(values, len(positions), random)
        gradients.append(gradient)
    return gradients


def draw_rows(key: object, rows: int, row: int, count: int, ranks: int, values: str = "integers") -> list[Array]:
    """Gradients of an embedding table: every rank has ``count`` rows, all of whose elements are nonzero."""
    random = generator(key, rows, row, count, ranks, values)
    gradients = []
    for _ in range(ranks):
        gradient = np.zeros((rows, row), np.float32)
        gradient[random.choice(rows, count, replace=False)] = draw_values(values, count * row, random).reshape(count, row)
        gradients.append(gradient)
    return gradients


def rounded(exact: Fraction, dtype: str = "float32") -> float:
    """The nearest number of a format, ties to even."""
    precision, least, top = FORMATS[dtype]
    if not exact:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = max(exponent - precision + 1, least)
    units = round(size / Fraction(2) ** unit)  # Fraction rounds half to even
    result = math.inf if units * Fraction(2) ** unit >= 2**top else math.ldexp(units, unit)
    return math.copysign(result, exact)


def exact_sum(gradients: list[Array], factor: Fraction = Fraction(1), dtype: str = "float32") -> Array:
    """The sum of finite gradients times a factor, rounded once, as float32."""
    result = np.zeros(gradients[0].shape, np.float32)
    union = np.logical_or.reduce([gradient != 0 for gradient in gradients])
    for position in zip(*np.nonzero(union), strict=True):
        total = sum((Fraction(float(gradient[position])) for gradient in gradients), Fraction(0))
        result[position] = rounded(total * factor, dtype)
    return result


def assert_same_bits(actual: Array, expected: Array, what: str) -> None:
    """Equal in shape, type and bits; zeros without their sign, NaNs without their payload."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if not np.issubdtype(actual.dtype, np.floating):
        assert np.array_equal(actual, expected), what
        return
    bits = np.dtype(f"i{actual.dtype.itemsize}")
    actual, expected = actual + actual.dtype.type(0), expected + expected.dtype.type(0)
    different = np.ascontiguousarray(actual).view(bits) != np.ascontiguousarray(expected).view(bits)
    different &= ~(np.isnan(actual) & np.isnan(expected))
    if different.any():
        first = tuple(int(i[0]) for i in np.nonzero(different))
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.size} elements differ, the first at {first}: "
            f"{float(actual[first])!r}, expected {float(expected[first])!r}"
        )
