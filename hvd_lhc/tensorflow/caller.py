"""What Horovod is about to do with a tensor: it hands a compressor the tensor, but says nothing of the reduction."""

from __future__ import annotations

import sys
from typing import Any

import horovod.tensorflow as hvd

__all__ = ["dense_options", "is_in_a_group", "no_sum"]

#: What is no sum, by name.
_NO_SUMS = {hvd.Adasum: "Adasum", hvd.Min: "Min", hvd.Max: "Max", hvd.Product: "Product"}
#: How far Horovod's function may be up the stack, with AutoGraph in between.
_FRAMES_TO_LOOK_AT = 24


def is_in_a_group() -> bool:
    """Is a tensor being compressed that Horovod reduces together with others? All of them must then have one type."""
    return _reducing_frame()[0] == "grouped_allreduce"


def no_sum() -> str:
    """The name of the reduction that a tensor is being compressed for, if it can't carry sketches; empty otherwise."""
    name, variables = _reducing_frame()
    return "reducescatter" if name.endswith("reducescatter") else _NO_SUMS.get(variables.get("op"), "")


def dense_options(reduced: Any) -> dict[str, Any] | None:
    """What makes ``hvd.allreduce`` reduce a gradient just as its wire was reduced; ``None`` if that can't be told.

    Args:
        reduced: the reduced wire: of a graph, or while Horovod's function is on the stack.
    """
    if hasattr(reduced, "numpy"):
        _, variables = _reducing_frame()
        names = ("op", "prescale_factor", "postscale_factor")
        return {name: variables[name] for name in names} if variables.keys() >= set(names) else None
    if reduced.op.type not in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
        return None
    attributes = {"op": "reduce_op", "prescale_factor": "prescale_factor", "postscale_factor": "postscale_factor"}
    return {name: reduced.op.get_attr(attribute) for name, attribute in attributes.items()}


def _reducing_frame() -> tuple[str, dict[str, Any]]:
    """Name and variables of Horovod's function that called; an empty name if there is none."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_LOOK_AT):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_globals.get("__name__") == hvd.__name__:
            name = frame.f_code.co_name.removeprefix("tf__")  # so AutoGraph calls what it converted
            if name in ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"):
                return name, frame.f_locals
    return "", {}
