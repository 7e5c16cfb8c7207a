"""For whom a tensor is compressed: Horovod hands a compressor the tensor, but not what it is going to do with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from horovod.torch.mpi_ops import Adasum, Average, Max, Min, Product, Sum

__all__ = ["Call", "Caller", "caller_of", "find_call"]

#: A list comprehension has a frame of its own before Python 3.12, and a user's compressor may stand in between.
_FRAMES_TO_LOOK_AT = 6
#: What is no sum, by name.
_NO_SUMS = {Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}


@dataclass(frozen=True)
class Caller:
    """What the frame of Horovod's function tells.

    Attributes:
        parameter: Horovod's name of the gradient's parameter, the same on all ranks; empty for a call by hand.
        options: what makes ``hvd.allreduce_async`` reduce the gradient itself just as its wire is going to be; ``None`` if
            that can't be told.
        process_set: the ranks that an optimizer reduces over.
    """

    parameter: str = ""
    options: dict[str, Any] | None = None
    process_set: Any | None = None

    @property
    def has_names(self) -> bool:
        """Is the tensor one of an optimizer's sums, which has a name that no other tensor of the step has?"""
        if not self.parameter or self.options is None or self.process_set is None:
            return False
        return self.options["op"] in (Average, Sum)


class Call(NamedTuple):
    """A call of Horovod's as its frame shows it: quickly found, once for each tensor and step.

    ``no_sum`` is the name of a reduction that can't carry sketches.
    """

    optimizer: Any | None = None
    parameter: str = ""
    predivides: bool = False
    options: dict[str, Any] | None = None
    no_sum: str = ""


def find_call() -> Call:
    """Which function of Horovod 0.28 called the function that calls this one."""
    frame = sys._getframe(1).f_back
    parameter = None
    for _ in range(_FRAMES_TO_LOOK_AT):
        if frame is None:
            break
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "horovod.torch.optimizer":
            local = frame.f_locals
            parameter = local.get("p", parameter)  # in a comprehension over a group, before Python 3.12
            if function in ("_allreduce_grad_async", "_grouped_allreduce_grad_async"):
                # Horovod leaves the predivide factor out where it reduces groups.
                optimizer = local["self"]
                name = str(getattr(optimizer, "_parameter_names", {}).get(parameter, ""))
                no_sum = "" if hasattr(optimizer, "op") else "Adasum"  # which has an optimizer of its own
                return Call(optimizer, name, predivides=function == "_allreduce_grad_async", no_sum=no_sum)
        elif module == "horovod.torch.mpi_ops" and function in ("allreduce", "grouped_allreduce"):
            names = ("average", "op", "prescale_factor", "postscale_factor")
            options = {name: frame.f_locals[name] for name in names}
            return Call(options=options, no_sum=_NO_SUMS.get(options["op"], ""))
        elif module == "horovod.torch.mpi_ops" and function in ("reducescatter", "grouped_reducescatter"):
            return Call(no_sum="reducescatter")
        frame = frame.f_back
    return Call()


def caller_of(call: Call) -> Caller:
    """All that there is to know about a call; the same for each call of an optimizer for one parameter."""
    optimizer = call.optimizer
    if optimizer is None:
        return Caller(options=call.options)
    op, process_set = getattr(optimizer, "op", None), getattr(optimizer, "process_set", None)
    if op is None:  # Adasum's
        return Caller(call.parameter)
    options = {"op": op}
    if op == Average and call.predivides:
        factor = getattr(optimizer, "gradient_predivide_factor", 1.0)
        options |= {"prescale_factor": 1.0 / factor, "postscale_factor": factor}
    return Caller(call.parameter, options, process_set)
