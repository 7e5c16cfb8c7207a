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


#: Exponents of a float32's own last bit begin here.
_LOWEST_UNIT = -149
_UNITS = 278


@dataclass(frozen=True)
class Need:
    """What one step needs of a plan.

    Attributes:
        elements, rows: distinct nonzero ones over all ranks.
        exponent: every element on every rank is below two to this.
        finer_elements, finer_rows: how many of them are, on some rank, no multiple of two to (the position - 149).
    """

    elements: int
    rows: int
    exponent: int
    finer_elements: NDArray[np.int64]
    finer_rows: NDArray[np.int64]

    def keys(self, plan: Plan) -> int | None:
        """How many keys the step has under a plan; ``None`` if the plan can't hold one of its elements exactly."""
        if self.exponent > plan.exponent or self.finer_elements[plan.unit_exponent - _LOWEST_UNIT]:
            return None
        keys, finer = (self.rows, self.finer_rows) if plan.block > 1 else (self.elements, self.finer_elements)
        low = int(finer[plan.unit_exponent + plan.layout.low_bits - _LOWEST_UNIT]) if plan.parts == 2 else 0
        return max(1, keys + low)


def need_of(gradients: Sequence[NDArray[np.float32]]) -> Need:
    """Look at the gradients of all ranks."""
    tables = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    used = np.flatnonzero(np.any([table.any(axis=1) for table in tables], axis=0))
    units = np.full((len(used), tables[0].shape[1]), _UNITS)  # beyond all: a zero
    exponent = _LOWEST_UNIT
    for table in tables:
        flat = table[used]
        nonzero = np.nonzero(flat)
        mantissas, exponents = np.frexp(np.abs(flat[nonzero]).astype(np.float64))
        integers = (mantissas * 2**24).astype(np.int64)  # float32 has 24 bits
        trailing = np.log2((integers & -integers).astype(np.float64)).astype(np.int64)
        units[nonzero] = np.minimum(units[nonzero], exponents - 24 + trailing - _LOWEST_UNIT)
        exponent = max(exponent, int(exponents.max(initial=exponent)))
    rows = units.min(axis=1, initial=_UNITS)
    return Need(int((units < _UNITS).sum()), int((rows < _UNITS).sum()), exponent, _finer(units.ravel()), _finer(rows))


def _finer(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every unit, how many are smaller."""
    counts = np.bincount(units, minlength=_UNITS + 1)[:_UNITS]
    return np.concatenate([[0], np.cumsum(counts)[:-1]])


def best_fixed_bytes(needs: Sequence[Need], tensor: Tensor, world_size: int, max_wire_ratio: float) -> float:
    """Bytes per step of the cheapest single plan; steps that it can't hold send its wire and the dense gradient.

    Every index, block, number of parts, exponent that occurs and capacity that occurs is tried, and dense from the start.
    A capacity holds as many keys as it says, without headroom. As for the planner, a wire has ``max_wire_ratio`` of the
    dense bytes at most.
    """
    best = float(tensor.dense_bytes)
    blocks = (1, tensor.row) if tensor.has_rows else (1,)
    exponents = sorted({need.exponent for need in needs})
    for index, block, parts, exponent in product(("keyed", "bitmap"), blocks, (1, 2), exponents):
        template = _plan(tensor, world_size, index, block, parts, exponent, tensor.numel)
        if template is None:
            continue
        keys = sorted(k for need in needs if (k := need.keys(template)) is not None)
        for held, capacity in enumerate(keys, start=1):
            if held < len(keys) and keys[held] == capacity:
                continue
            plan = _plan(tensor, world_size, index, block, parts, exponent, capacity)
            if plan is None or plan.wire_bytes > max_wire_ratio * tensor.dense_bytes:
                continue
            dense = (len(needs) - held) * tensor.dense_bytes
            best = min(best, plan.wire_bytes + dense / len(needs))
    return best


def _plan(tensor: Tensor, world_size: int, index: str, block: int, parts: int, exponent: int, capacity: int) -> Plan | None:
    try:
        return Plan(tensor.numel, world_size, capacity, index, block, parts, exponent)
    except ConfigError:
        return None
