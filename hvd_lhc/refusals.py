"""What a sketch can't pass through, said before anything is sent: the same on all ranks, since all make the same call."""

from __future__ import annotations

from hvd_lhc.errors import UnsupportedError

__all__ = ["refuse_operation"]

_REASONS = {
    "Adasum": "Adasum adds gradients with weights that it takes from their inner products, which a sketch doesn't have",
    "Min": "the minimum of sketches is no sketch of the minimum",
    "Max": "the maximum of sketches is no sketch of the maximum",
    "Product": "the product of sketches is no sketch of the product",
    "reducescatter": "reducescatter leaves each rank a part of the sum, and a part of a sketch can't be decoded",
}


def refuse_operation(what: str, shape: object) -> None:
    """Raise if a reduction doesn't add up what it is given.

    Args:
        what: ``"Adasum"``, ``"Min"``, ``"Max"``, ``"Product"``, ``"reducescatter"`` or anything else, which passes.
        shape: of the gradient.

    Raises:
        UnsupportedError: see above.
    """
    if what not in _REASONS:
        return
    name = "hvd.reducescatter" if what == "reducescatter" else f"op=hvd.{what}"
    size = tuple(shape) if isinstance(shape, (tuple, list)) else shape
    raise UnsupportedError(
        f"hvd_lhc: a gradient of shape {size} can't be compressed for {name}: "
        f"{_REASONS[what]}. Use op=hvd.Sum or op=hvd.Average, or leave compression out (compression=Compression.none)."
    )
