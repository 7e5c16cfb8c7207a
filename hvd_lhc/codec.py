"""How one tensor becomes a wire and a reduced wire becomes a tensor, under a :class:`~hvd_lhc.plan.Plan`.

NumPy only; nothing here knows Horovod. The format is ``docs/wire-format.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_lhc import _kernel
from hvd_lhc.errors import ConfigError, DecodeError, WireError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvd_lhc.plan import Plan

__all__ = ["Codec", "Header"]


@dataclass(frozen=True)
class Header:
    """What all ranks learn from the same reduced wire: exact integers, summed over the ranks that took part.

    Attributes:
        participants: ranks that took part (fewer than the plan's world size after Horovod's ``join``).
        scale: ``"sum"``, ``"average"`` or ``"other"``: what the reduction multiplied the sum by.
        factor: that factor: 1, 1 / world_size, or another one.
        nonzero_elements: nonzero elements.
        nonzero_keys: keys (blocks of ``plan.block`` elements) with a nonzero element.
        nonfinite: elements that are NaN or infinite.
        overflow: finite elements with ``|x| >= 2 ** plan.exponent``.
        inexact: elements that the plan can't hold exactly.
        inexact_single: elements that have a low part (or would, with two parts).
        over_capacity: ranks that have more than ``plan.capacity`` nonzero keys.
        nonzero_probe_blocks: blocks of ``plan.probe_block`` elements with a nonzero element.
        content: a sum of the ranks' hashes, each of the rank's number and nonzero elements; tells apart wires that are
            equal otherwise, as when two ranks exchange their gradients.
        magnitude_exponent: every finite element of every rank is below ``2 ** magnitude_exponent``, within a factor of
            16; ``None`` if there is no finite nonzero element.
    """

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
class Decoded:
    """A verified gradient and what was learned on the way.

    Attributes:
        values: float32, shape ``(numel,)``.
        header: the reduced wire's :class:`Header`.
        union_keys: distinct nonzero keys over all ranks.
    """

    values: NDArray[np.float32]
    header: Header
    union_keys: int


@dataclass(frozen=True)
class Encoded:
    """A wire and what was noticed on the way.

    Attributes:
        wire: float64, shape ``(plan.wire_size,)``.
        negative_zeros: does the gradient hold elements that are -0 (sent like +0)?
    """

    wire: NDArray[np.float64]
    negative_zeros: bool


class Codec:
    """Encodes and decodes under one plan. Stateless beside the plan, cheap to make, usable from several threads.

    >>> import numpy as np
    >>> from hvd_lhc import Codec, Plan
    >>> plan = Plan(numel=1000, world_size=2, capacity=8, exponent=4)
    >>> codec = Codec(plan)
    >>> x, y = np.zeros((2, 1000), np.float32)
    >>> x[7], y[7], y[42] = 1.5, 0.25, -3
    >>> total = codec.decode(codec.encode(x, rank=0) + codec.encode(y, rank=1))
    >>> float(total[7]), float(total[42])
    (1.75, -3.0)
    """

    def __init__(self, plan: Plan) -> None:
        if not hasattr(plan, "layout"):
            raise ConfigError(f"Codec wants a Plan, not {plan!r}: write Codec(Plan(numel=..., world_size=..., capacity=...))")
        self.plan = plan
        self._layout = plan.layout

    def encode(
        self, x: NDArray[np.float32], *, rank: int | None = None, out: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Encode one rank's gradient.

        Args:
            x: float32, shape ``(plan.numel,)``, contiguous; not modified.
            rank: this rank, 0 to world_size - 1. With it, decode can tell sums from other reductions and see which ranks
                were missing. Leave it out only where all ``world_size`` wires are added by yourself.
            out: a contiguous float64 array of ``plan.wire_size`` to write into instead of a new one.

        Returns:
            float64, shape ``(plan.wire_size,)``. Elements that do not fit the plan are declared in its header; no
            exception is raised for them, since all ranks must learn of it: ``decode`` refuses.

        Raises:
            ConfigError: ``x``, ``rank`` or ``out`` is not what the plan says.
        """
        return self.encode_with_facts(x, rank=rank, out=out).wire

    def encode_with_facts(
        self, x: NDArray[np.float32], *, rank: int | None = None, out: NDArray[np.float64] | None = None
    ) -> Encoded:
        """As :meth:`encode`, and whether the gradient holds elements that are -0."""
        x = np.asarray(x)
        if x.dtype != np.float32 or x.shape != (self.plan.numel,):
            raise ConfigError(
                f"encode wants a float32 array of shape ({self.plan.numel},), got {x.dtype} of shape {x.shape}; "
                f"use x.astype(np.float32).ravel(), or a plan with numel={x.size}"
            )
        if rank is not None and rank not in range(self.plan.world_size):
            raise ConfigError(f"rank {rank!r} is not in 0 .. {self.plan.world_size - 1}, the plan's world_size")
        if out is None:
            out = np.empty(self.plan.wire_size, np.float64)
        elif out.dtype != np.float64 or out.shape != (self.plan.wire_size,) or not out.flags.carray:
            raise ConfigError(
                f"out must be a contiguous, aligned, writeable float64 array of shape ({self.plan.wire_size},), "
                f"got {out.dtype} of shape {out.shape}"
            )
        x = np.require(x, requirements=["C", "A"])
        return Encoded(out, _kernel.encode(self._layout, x, -1 if rank is None else int(rank), out))

    def decode(
        self, wire: NDArray[np.float64], *, dtype: str = "float32", out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """The exact sum of what the ranks encoded, times the reduction's factor, rounded once.

        Args:
            wire: the sum of the ranks' wires, float64, shape ``(plan.wire_size,)``, perhaps multiplied by a factor.
            dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``: the format that results are rounded to.
            out: a contiguous float32 array of shape ``(plan.numel,)`` to write into instead of a new one. It must be zero, or
                hold the gradient that this rank has encoded into the wire, without elements that are -0
                (``Encoded.negative_zeros``): only the union's elements are written, which include all of this rank's. It is
                written to only after everything has been verified, so that it is unchanged if an exception is raised.

        Returns:
            float32, shape ``(plan.numel,)``, whose values are representable in ``dtype``.

        Raises:
            WireError: ``wire`` is not a wire of this plan.
            DecodeError: it can't be decoded, or not be verified; nothing is returned in that case.
            ConfigError: ``dtype`` or ``out`` is none that can be.
        """
        return self.decode_with_facts(wire, dtype=dtype, out=out).values

    def decode_with_facts(
        self, wire: NDArray[np.float64], *, dtype: str = "float32", out: NDArray[np.float32] | None = None
    ) -> Decoded:
        """As :meth:`decode`, with the header and the size of the union of keys."""
        if dtype not in _kernel.FORMAT_CODES:
            raise ConfigError(f"dtype must be one of {', '.join(_kernel.FORMAT_CODES)}, not {dtype!r}")
        if out is not None and (out.dtype != np.float32 or out.shape != (self.plan.numel,) or not out.flags.carray):
            raise ConfigError(
                f"out must be a contiguous, aligned, writeable float32 array of shape ({self.plan.numel},), "
                f"got {out.dtype} of shape {out.shape}"
            )
        values = np.zeros(self.plan.numel, np.float32) if out is None else out
        raw, union_keys, status, text = _kernel.decode(self._layout, self._as_wire(wire), dtype, values)
        header = Header(*raw)
        if status:
            raise DecodeError(f"{text} (plan: {self.plan})", reason=_kernel.reason_of(status), header=header)
        return Decoded(values, header, union_keys)

    def read_header(self, wire: NDArray[np.float64]) -> Header:
        """The header of a reduced wire, checked.

        Raises:
            WireError: ``wire`` is not a wire of this plan.
            DecodeError: the header can't be trusted (not a sum, not integers, wrong checksum).
        """
        return Header(*_kernel.read_header(self._layout, self._as_wire(wire)))

    def _as_wire(self, wire: Any) -> NDArray[np.float64]:
        wire = np.asarray(wire)
        if wire.dtype != np.float64 or wire.shape != (self.plan.wire_size,):
            raise WireError(
                f"a wire of this plan is a float64 array of shape ({self.plan.wire_size},), "
                f"got {wire.dtype} of shape {wire.shape}"
            )
        return np.require(wire, requirements=["C", "A"])
