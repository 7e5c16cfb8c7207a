"""For whom a tensor is compressed: Horovod hands a compressor the tensor, but not what it is going to do with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from horovod.torch.mpi_ops import Average, Sum

__all__ = ["Caller", "find_caller"]

#: A list comprehension has a frame of its own before Python 3.12, and a user's compressor may stand in between.
_FRAMES_TO_LOOK_AT = 6


@dataclass(frozen=True)
class Caller:
    """What the frame of Horovod's function tells.

    Attributes:
        optimizer: the optimizer that reduces its gradients; ``None`` for a call by hand.
        parameter: Horovod's name of the gradient's parameter, the same on all ranks; empty for a call by hand.
        options: what makes ``hvd.allreduce_async`` reduce the gradient itself just as its wire is going to be; ``None`` if
            that can't be told.
    """

    optimizer: Any | None = None
    parameter: str = ""
    options: dict[str, Any] | None = None

    @property
    def has_names(self) -> bool:
        """Is the tensor one of an optimizer's sums, which has a name that no other tensor of the step has?"""
        return bool(self.parameter) and self.options is not None and self.options["op"] in (Average, Sum)


def find_caller() -> Caller:
    """Which function of Horovod 0.28 called the function that calls this one."""
    frame = sys._getframe(1).f_back
    parameter = None
    for _ in range(_FRAMES_TO_LOOK_AT):
        if frame is None:
            break
        function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if function[0] == "horovod.torch.optimizer":
            parameter = frame.f_locals.get("p", parameter)  # in a comprehension over a group, before Python 3.12
            if function[1] in ("_allreduce_grad_async", "_grouped_allreduce_grad_async"):
                # Horovod leaves the predivide factor out where it reduces groups.
                return _of_optimizer(frame.f_locals["self"], parameter, predivides=function[1] == "_allreduce_grad_async")
        if function in (("horovod.torch.mpi_ops", "allreduce"), ("horovod.torch.mpi_ops", "grouped_allreduce")):
            names = ("average", "op", "prescale_factor", "postscale_factor")
            return Caller(options={name: frame.f_locals[name] for name in names})
        frame = frame.f_back
    return Caller()


def _of_optimizer(optimizer: Any, parameter: Any, predivides: bool) -> Caller:
    name = str(getattr(optimizer, "_parameter_names", {}).get(parameter, ""))
    op = getattr(optimizer, "op", None)
    if op is None:  # Adasum's
        return Caller(optimizer, name)
    if op != Average or not predivides:
        return Caller(optimizer, name, {"op": op})
    factor = getattr(optimizer, "gradient_predivide_factor", 1.0)
    return Caller(optimizer, name, {"op": op, "prescale_factor": 1.0 / factor, "postscale_factor": factor})
