"""What ``compress`` leaves for ``decompress``: one of these, or ``None`` for a tensor that goes as it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hvd_lhc.compressor import Outcome, Ticket
    from hvd_lhc.errors import DecodeError, UnsupportedError

__all__ = ["Dense", "Sketch", "Watched"]


@dataclass(frozen=True)
class Dense:
    """Context of a tensor that goes dense in another dtype than its own."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Watched:
    """Context of a tensor that goes dense as it is, while its header goes beside it."""

    dtype: torch.dtype
    ticket: Ticket
    handle: int  # Horovod's, of the header


class Sketch:
    """Context of a tensor whose wire is under way."""

    def __init__(
        self, gradient: torch.Tensor, wire: torch.Tensor, ticket: Ticket, options: dict[str, Any] | None, parameter: str
    ) -> None:
        self.parameter = parameter  # of an optimizer, or ""
        self.gradient = gradient
        self.wire = wire
        self.ticket = ticket
        self.options = options  # for a dense reduction in its place
        self.outcome: Outcome | None = None
        self.failure: DecodeError | UnsupportedError | None = None
        self.retry: int | None = None  # Horovod's handle of the dense reduction
        self.version = gradient._version if parameter else 0  # that was encoded; not every tensor has one
        self.in_place: torch.Tensor | None = None  # the gradient's own memory, if the result may be written there

    @property
    def is_outdated(self) -> bool:
        """Has somebody written to the optimizer's gradient since it was encoded?"""
        return bool(self.parameter) and self.gradient._version != self.version

    def output(self) -> Any:
        """Where to write the result: over the gradient, as Horovod's optimizers do it themselves, or ``None`` for a new array."""
        return None if self.in_place is None or self.is_outdated else self.in_place.numpy()

    def warn_of_late_change(self) -> None:
        """Say that the gradient was written to between ``backward`` and ``synchronize``, when it was already on its way."""
        warnings.warn(
            f"hvd_lhc: the gradient of {self.parameter!r} was changed (unscaled? clipped?) between backward() and "
            "synchronize(). Horovod takes each gradient as soon as backward() has computed it, so that what comes back may be "
            "without the change, with compression and without. Call optimizer.synchronize() first, then "
            "scaler.unscale_(optimizer) or clip_grad_norm_(...), then optimizer.step() or scaler.step(optimizer) inside of "
            "`with optimizer.skip_synchronize():`.",
            UserWarning,
            stacklevel=4,  # decompress, its wrapper, Horovod's synchronize, the user's call
        )
