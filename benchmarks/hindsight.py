"""The best fixed plan for a tensor, chosen when all of its steps are known: what ``planner.py`` compares the planner with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hvd_lhc import ConfigError, Plan
from hvd_lhc.sizing import Tensor

__all__ = ["Need", "best_fixed_bytes", "need_of"]


@dataclass(frozen=True)
class Need:
    """What one step needs of a plan.

    Attributes:
        elements, rows: distinct nonzero ones over all ranks.
        exponent: every element on every rank is below two to this.
        unit: and a multiple of two to this.
    """

    elements: int
    rows: int
    exponent: int
    unit: int


def need_of(gradients: Sequence[NDArray[np.float32]]) -> Need:
    """Look at the gradients of all ranks."""
    union = np.logical_or.reduce([gradient != 0 for gradient in gradients])
    rows = union.reshape(len(union), -1).any(axis=1)
    values = np.concatenate([gradient[gradient != 0] for gradient in gradients])
    if not len(values):
        return Need(0, 0, -149, 128)
    mantissas, exponents = np.frexp(np.abs(values).astype(np.float64))
    integers = (mantissas * 2**24).astype(np.int64)  # float32 has 24 bits
    trailing = np.log2((integers & -integers).astype(np.float64)).astype(int)
    return Need(int(union.sum()), int(rows.sum()), int(exponents.max()), int((exponents - 24 + trailing).min()))


def best_fixed_bytes(needs: Sequence[Need], tensor: Tensor, world_size: int) -> float:
    """Bytes per step of the cheapest single plan; steps that it can't hold send its wire and the dense gradient.

    Every index, block, number of lanes, exponent that occurs and capacity that occurs is tried, and dense from the start.
    A capacity holds as many keys as it says, without headroom.
    """
    best = float(tensor.dense_bytes)
    blocks = (1, tensor.row) if tensor.has_rows else (1,)
    exponents = sorted({need.exponent for need in needs})
    for index, block, lanes, exponent in product(("keyed", "bitmap"), blocks, (1, 2), exponents):
        template = _plan(tensor, world_size, index, block, lanes, exponent, tensor.numel)
        if template is None:
            continue
        fitting = [n for n in needs if n.exponent <= exponent and n.unit >= template.unit_exponent]
        keys = sorted(max(1, n.rows if block > 1 else n.elements) for n in fitting)
        for held, capacity in enumerate(keys, start=1):
            if held < len(keys) and keys[held] == capacity:
                continue
            plan = _plan(tensor, world_size, index, block, lanes, exponent, capacity)
            if plan is None:
                continue
            dense = (len(needs) - held) * tensor.dense_bytes
            best = min(best, plan.wire_bytes + dense / len(needs))
    return best


def _plan(tensor: Tensor, world_size: int, index: str, block: int, lanes: int, exponent: int, capacity: int) -> Plan | None:
    try:
        return Plan(tensor.numel, world_size, capacity, index, block, lanes, exponent)
    except ConfigError:
        return None
