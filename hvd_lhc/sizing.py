"""The smallest wire for a tensor of which it is known how many elements and rows are nonzero. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_lhc.errors import ConfigError
from hvd_lhc.plan import Plan
from hvd_lhc.settings import Settings

__all__ = ["Tensor", "cheapest_plan", "grow_plan", "header_plan", "roomiest"]

#: Exponent room: the largest magnitude seen may grow by this many powers of two before a step has to be retried.
_EXPONENT_HEADROOM = 2
#: Rows longer than this are not taken as blocks: a cell would waste more than it saves.
_LONGEST_ROW = 8192
_MOST_KEYS = 2**31 - 1


@dataclass(frozen=True)
class Tensor:
    """The shape of a gradient, as far as it matters.

    Attributes:
        numel: elements.
        row: elements of one row (the product of all dimensions but the first), 1 for vectors.
        element_bytes: bytes of an element on the dense path.
        top_exponent: finite numbers of the dtype are below two to this: 128, or 16 for float16.
    """

    numel: int
    row: int
    element_bytes: int
    top_exponent: int = 128

    @property
    def dense_bytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return self.numel * self.element_bytes

    def roomy_exponent(self, magnitude: int | None, world_size: int) -> int:
        """An exponent with room above ``magnitude``, but none under which a sum of all ranks could leave the dtype.

        Such a sum overflows in an uncompressed Horovod; beyond this exponent it is left to do just that.
        """
        limit = self.top_exponent - (world_size - 1).bit_length()
        return min(0 if magnitude is None else magnitude + _EXPONENT_HEADROOM, limit)

    @property
    def has_rows(self) -> bool:
        """Are rows worth considering as blocks?"""
        return 1 < self.row <= _LONGEST_ROW and self.numel >= 2 * self.row


def header_plan(tensor: Tensor, world_size: int, settings: Settings) -> Plan:
    """The plan of a wire that carries a header and no gradient.

    Raises:
        ConfigError: the tensor is too large for this world size to be counted.
    """
    return Plan(
        numel=tensor.numel,
        world_size=world_size,
        index="none",
        exponent=128,
        precision=settings.precision,
        probe_block=tensor.row if tensor.has_rows else 1,
    )


def grow_plan(plan: Plan, keys: int) -> Plan | None:
    """The plan with a capacity for so many keys; ``None`` if there is none."""
    try:
        return roomiest(replace(plan, capacity=min(max(1, keys), _MOST_KEYS)))
    except ConfigError:
        return None


def roomiest(plan: Plan) -> Plan:
    """The plan with the largest capacity that doesn't make its wire larger: tables grow in segments."""
    step = 1
    while (more := _with_room_for(plan, step)) is not None:
        plan, step = more, 2 * step
    while step:
        plan = _with_room_for(plan, step) or plan
        step //= 2
    return plan


def _with_room_for(plan: Plan, more: int) -> Plan | None:
    """With a capacity for more keys, if the wire stays as it is."""
    if plan.capacity + more > _MOST_KEYS:
        return None
    larger = replace(plan, capacity=plan.capacity + more)
    return larger if larger.wire_size <= plan.wire_size else None


def cheapest_plan(
    tensor: Tensor,
    world_size: int,
    settings: Settings,
    block: int,
    keys: int,
    exponent: int,
    parts: int,
    seed: int,
) -> Plan | None:
    """The plan with the smallest wire that has room for so many keys of this block; ``None`` if none can be."""
    best: Plan | None = None
    for index in ("keyed", "bitmap"):
        try:
            plan = Plan(
                numel=tensor.numel,
                world_size=world_size,
                capacity=min(max(1, keys), _MOST_KEYS),
                index=index,
                block=block,
                parts=parts,
                exponent=exponent,
                seed=seed,
                precision=settings.precision,
                probe_block=tensor.row if tensor.has_rows else 1,
            )
        except ConfigError:
            continue
        if best is None or plan.wire_size < best.wire_size:
            best = plan
    return None if best is None else roomiest(best)
