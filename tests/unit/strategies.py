"""Plans and gradients for the tests of the codec and of its reference, drawn by Hypothesis or made by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from hvd_lhc import Plan, reference

Array = np.ndarray[Any, Any]
VALUES = ("normal", "equal", "alternating", "tiny beside huge", "subnormal", "zeros of both signs")
SUPPORTS = ("random", "identical", "disjoint", "nested", "one row", "one segment")
#: A slow machine is no bug: no test here has a deadline.
unhurried = settings(deadline=None)


class BarePlan(NamedTuple):
    """A plan, without the kernel that :class:`hvd_lhc.Plan` needs."""

    numel: int
    world_size: int = 2
    capacity: int = 16
    index: str = "keyed"
    block: int = 1
    parts: int = 1
    exponent: int = 4
    precision: str = "lossless"
    seed: int = 0
    probe_block: int = 1


def sparse(numel: int, elements: dict[int, float]) -> Array:
    """A float32 array that is zero but for these elements."""
    x = np.zeros(numel, np.float32)
    for i, value in elements.items():
        x[i] = value
    return x


def total_of(plan: BarePlan, gradients: list[Array]) -> Array:
    """The reduced wire."""
    return np.sum([reference.encode(plan, x, rank) for rank, x in enumerate(gradients)], axis=0)


def draw_values(rng: np.random.Generator, kind: str, count: int) -> Array:
    """``count`` float32 of one kind."""
    if kind == "equal":
        return np.full(count, 0.1, np.float32)
    if kind == "alternating":
        return np.where(np.arange(count) % 2, np.float32(-1 / 3), np.float32(1 / 3)).astype(np.float32)
    if kind == "tiny beside huge":
        return np.ldexp(rng.standard_normal(count), rng.integers(-20, 20, count)).astype(np.float32)
    if kind == "subnormal":
        return (rng.integers(-1000, 1000, count) * 2.0**-149).astype(np.float32)
    if kind == "zeros of both signs":
        return rng.choice(np.array([0.0, -0.0, 1.0, -1.0], np.float32), count)
    if kind == "any bits":  # NaNs and infinities among them
        words: Array = rng.integers(0, 2**32, count, dtype=np.uint32)
        return np.where(rng.random(count) < 0.1, words | np.uint32(0x7F800000), words).astype(np.uint32).view(np.float32)
    return rng.standard_normal(count).astype(np.float32)


def draw_support(rng: np.random.Generator, kind: str, plan: Plan, ranks: int, density: float = 0.25) -> list[Array]:
    """Which elements each rank has: those of ``density`` of all keys, at most."""
    block, keys = plan.block, -(-plan.numel // plan.block)
    few = max(1, int(keys * density))
    common = rng.choice(keys, few, replace=False)
    if kind == "one segment":  # keys that all begin in the table's first segment
        geometry = reference.geometry(plan)
        starts = np.array([reference.cells_of_key(geometry, key)[1][0] for key in range(keys)])
        inside = np.flatnonzero(starts >> plan.layout.segment_bits == 0)
        common = inside[:few] if len(inside) else common
    chosen = []
    for rank in range(ranks):
        if kind in ("identical", "one segment"):
            mine = common
        elif kind == "disjoint":
            mine = common[rank::ranks]
        elif kind == "nested":
            mine = common[: 1 + few * (rank + 1) // (2 * ranks)]
        elif kind == "one row":
            mine = np.arange(few)
        else:
            mine = rng.choice(keys, rng.integers(0, few + 1), replace=False)
        elements = (mine[:, None] * block + np.arange(block)).ravel()
        chosen.append(elements[elements < plan.numel])
    return chosen


def draw_gradients(rng: np.random.Generator, plan: Plan, ranks: int, values: str, support: str, density: float) -> list[Array]:
    """One float32 array of ``plan.numel`` per rank."""
    gradients = []
    for elements in draw_support(rng, support, plan, ranks, density):
        x = np.zeros(plan.numel, np.float32)
        x[elements] = draw_values(rng, values, len(elements))
        gradients.append(x)
    return gradients


@st.composite
def cases(draw: st.DrawFn, values: tuple[str, ...] = VALUES) -> tuple[Plan, list[Array]]:
    """A plan, and one gradient per rank. They fit the plan, unless ``values`` has ``"any bits"``."""
    numel = draw(st.integers(1, 400))
    block = draw(st.integers(1, min(numel, 9)))
    kind, support = draw(st.sampled_from(values)), draw(st.sampled_from(SUPPORTS))
    seed = draw(st.integers(0, 2**64 - 1))
    plan = Plan(
        numel=numel,
        world_size=draw(st.integers(1, 8)),
        capacity=max(16, 2 * -(-numel // block)),
        index=draw(st.sampled_from(["keyed", "bitmap"])),
        block=block,
        parts=2,
        exponent=-130 if kind == "subnormal" else 24,
        seed=seed,
        precision="lossless",
    )
    density = draw(st.sampled_from([0.02, 0.25, 1.0]))
    return plan, draw_gradients(np.random.default_rng(seed), plan, plan.world_size, kind, support, density)


@st.composite
def plan_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a plan, each in its range: most are plans, some are impossible."""

    def up_to(bits: int) -> int:
        """Small and large numbers alike."""
        return draw(st.integers(0, bits).flatmap(lambda b: st.integers(2**b - 1, 2**b + 1)).filter(lambda n: 1 <= n <= 2**bits))

    numel = up_to(48)
    return {
        "numel": numel,
        "world_size": min(up_to(12), draw(st.integers(1, 4096))),
        "capacity": min(up_to(31), 2**31 - 1),
        "index": draw(st.sampled_from(["none", "keyed", "bitmap"])),
        "block": min(numel, up_to(20)),
        "parts": draw(st.integers(1, 2)),
        "exponent": draw(st.integers(-148, 128)),
        "precision": draw(st.sampled_from(["lossless", "bounded"])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "probe_block": min(numel, up_to(48)),
    }
