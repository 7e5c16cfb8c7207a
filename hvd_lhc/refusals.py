"""What a sketch can't pass through: said before anything is sent where that can be known, and else of what came back.

Either way it is the same on all ranks, since all make the same call, or read the same reduced wire.
"""

from __future__ import annotations

from hvd_lhc.errors import UnsupportedError

__all__ = ["not_a_sum", "refuse_operation"]

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


def not_a_sum(numel: int, world_size: int, reason: object) -> UnsupportedError:
    """The error for a reduced wire that is not what the ranks' wires add up to.

    Args:
        numel: elements of this rank's gradient.
        world_size: ranks that should have reduced it.
        reason: how that was found out.
    """
    return UnsupportedError(
        f"hvd_lhc: what came back for a gradient of {numel} elements is not the sum of {world_size} ranks' sketches ({reason}). "
        "Most likely the ranks handed in tensors of different shapes, or in another order: compare this tensor's shape on all "
        "ranks. Else: compressed gradients can be reduced with op=Sum or op=Average only, over the process set that the "
        "compressor knows: with Adasum, Min, Max or Product use compression=Compression.none; with process_set=S use "
        "compression=LHC(process_set=S); and give all ranks the same settings."
    )
