"""Steps that a sketch can't carry: they end in the exact dense result on all ranks, and the next step works.

Gradients are integers, so that plain Horovod's result doesn't depend on the order of additions.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import Array, assert_same_bits, draw_gradients, generator
from harness import case
from steps import integer_steps
from torch_common import PAIR, check_steps, plain, reduce, same_everywhere

from hvd_lhc import DecodeError, UnsupportedError
from hvd_lhc.torch import LHC

NUMEL = 100_000


def raised(kind: type[Exception], call: Any, *arguments: Any, **options: Any) -> Exception:
    """The exception that a call must raise."""
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def check_planted(name: str, plant: dict[int, list[tuple[int, float]]], expected: list[str]) -> None:
    """Six steps, in the fourth of which some ranks hold planted elements: ``{rank: [(position, value), ...]}``."""
    for op in (hvd.Sum, hvd.Average):
        steps = integer_steps((name, op), NUMEL, [100] * 6)
        for rank, elements in plant.items():
            for position, value in elements:
                steps[3][rank][position] = value
        lhc = LHC()
        happened = check_steps(f"{name} {op}", steps, lhc, op)
        assert happened == ["probe", "sketch", "sketch", *expected], f"{name} {op}: {happened}"
        reasons = {reason: expected.count(reason) for reason in expected if reason != "sketch"}
        assert lhc.statistics.refusals == reasons, lhc.statistics


@case(2, 3, 4)
def planted_nan_and_infinity() -> None:
    """NaN or infinity on one rank comes out as from plain Horovod; the step after is a sketch again."""
    for value in (np.nan, np.inf, -np.inf):
        check_planted(f"planted {value}", {1: [(5, value)]}, ["nonfinite", "sketch", "sketch"])


@case(2, 3, 4)
def planted_infinities_of_both_signs() -> None:
    """Infinity on one rank and its negative on another make NaN, as in plain Horovod."""
    check_planted("both signs", {0: [(5, np.inf)], 1: [(5, -np.inf)]}, ["nonfinite", "sketch", "sketch"])


@case(2, 3, 4)
def planted_tiny_element() -> None:
    """An element too small for a cell beside the others has a low part: exact, without a retry."""
    check_planted("tiny", {1: [(NUMEL - 1, 2.0**-40)]}, ["sketch", "sketch", "sketch"])


@case(2, 3, 4)
def planted_element_below_both_parts() -> None:
    """An element so small that even its low part can't hold it: exact dense result, and the next step works."""
    check_planted("below both parts", {0: [(NUMEL - 1, 2.0**-120)]}, ["inexact", "sketch", "sketch"])


@case(2, 3, 4)
def planted_huge_element() -> None:
    """An element beyond the plan's exponent: exact dense result, and the plan stays as it was."""
    check_planted("huge", {1: [(0, 2.0**60)]}, ["overflow", "sketch", "sketch"])


@case(2, 3, 4)
def low_parts_that_stay() -> None:
    """Elements that always have a low part are exact from the first sketch on."""
    steps = integer_steps("low parts", NUMEL, [100] * 6)
    for gradients in steps:
        for gradient in gradients:
            gradient[:10] = np.ldexp(np.arange(1, 11), -40)
    happened = check_steps("low parts", steps, LHC(), hvd.Sum)
    assert happened == ["probe"] + ["sketch"] * 5, happened


@case(2, 3, 4)
def beyond_both_parts_for_good() -> None:
    """Elements that never fit both parts send the tensor to the dense path after three retries."""
    steps = integer_steps("beyond", NUMEL, [100] * 6)
    for gradients in steps:
        gradients[0][:10] = np.ldexp(np.arange(1, 11), -120)
        for gradient in gradients[1:]:
            gradient[:10] = 0
    lhc = LHC()
    happened = check_steps("beyond", steps, lhc, hvd.Average)
    assert happened == ["probe", "inexact", "inexact", "inexact", "dense", "dense"], happened


@case(2, 3, 4)
def over_capacity_on_one_rank() -> None:
    """Density jumps from 0.1 % to 5 % on one rank: one retry, and the next step has the capacity."""
    for op in (hvd.Sum, hvd.Average):
        more = [100] * (hvd.size() - 1) + [5000]
        steps = integer_steps(("jump", op), NUMEL, [100, 100, 100, more, more, 100])
        lhc = LHC()
        happened = check_steps(f"jump {op}", steps, lhc, op)
        assert happened == ["probe", "sketch", "sketch", "over_capacity", "sketch", "sketch"], happened
        assert lhc.statistics.refusals == {"over_capacity": 1}, lhc.statistics


@case(2, 3, 4)
def union_that_cannot_be_peeled() -> None:
    """Every rank is within the capacity, but their union is not: one retry, and the next step has the capacity."""
    same = integer_steps("peel same", NUMEL, [2000] * 3, "identical")
    apart = integer_steps("peel apart", NUMEL, [2500] * 3, "disjoint")
    lhc = LHC()
    happened = check_steps("peel", same + apart, lhc, hvd.Sum)
    assert happened == ["probe", "sketch", "sketch", "unpeeled", "sketch", "sketch"], happened
    assert lhc.statistics.refusals == {"unpeeled": 1}, lhc.statistics


@case(2, 3, 4)
def half_precision_retries() -> None:
    """float16 and bfloat16: a planted NaN ends in a dense reduction with the right numbers elsewhere."""
    for dtype in (torch.float16, torch.bfloat16):
        lhc = LHC()
        for step in range(4):
            gradients = [g % 128 for g in draw_gradients((str(dtype), step), NUMEL, 100, hvd.size(), "nested")]
            expected = np.sum(gradients, axis=0)
            if step == 2:
                gradients[0][17] = expected[17] = np.nan
            tensor = torch.from_numpy(gradients[hvd.rank()]).to(dtype)
            result = reduce(tensor, lhc, f"retry {dtype}", op=hvd.Sum).astype(np.float32)
            expected = torch.from_numpy(expected).to(dtype).float().numpy()
            assert_same_bits(result, expected, f"{dtype} {step}")
        assert lhc.statistics.refusals == {"nonfinite": 1}, lhc.statistics


@case(3)
def density_up_and_down() -> None:
    """0.1 %, 20 %, 100 % and back: every step exact, at most one retry per change, sketches at both ends."""
    counts: list[int | list[int]] = [100] * 4 + [20_000] * 4 + [NUMEL] * 4 + [100] * 12
    lhc = LHC(reprobe_steps=3)
    happened = check_steps("density", integer_steps("density", NUMEL, counts), lhc, hvd.Sum)
    assert happened[1:4] == ["sketch"] * 3 and happened[-3:] == ["sketch"] * 3, happened
    retries = [kind not in ("sketch", "dense", "probe") for kind in happened]
    for first, last in ((0, 4), (4, 8), (8, 12), (12, 24)):
        assert sum(retries[first:last]) <= 1, happened


@case(2, 3, 4)
def density_that_drifts() -> None:
    """0.1 % to 20 % and back, 10 % more or less per step, up to a third more or less on each rank: exact, hardly a retry."""
    random = generator("drift")
    up = [100 * 1.1**step for step in range(56)]
    counts: list[int | list[int]] = [
        [int(count * random.uniform(0.7, 1.3)) for _ in range(hvd.size())] for count in up + up[::-1]
    ]
    happened = check_steps("drift", integer_steps("drift", NUMEL, counts), LHC(), hvd.Sum)
    retries = [kind for kind in happened if kind not in ("sketch", "dense", "probe")]
    assert len(retries) <= 4 and happened.count("sketch") >= 45, (retries, happened.count("sketch"))


@case(2, 3, 4)
def fallback_error() -> None:
    """With fallback="error" every rank gets the same DecodeError, nobody hangs, and the next step works."""
    lhc = LHC(fallback="error")
    more = [100] * (hvd.size() - 1) + [5000]
    steps = integer_steps("error", NUMEL, [100, 100, 100, 100, 100, more, more, more])
    steps[2][1][9] = np.nan
    messages = []
    for number, gradients in enumerate(steps):
        tensor = torch.from_numpy(gradients[hvd.rank()])
        options = {"compression": lhc, "name": "error", "op": hvd.Sum}
        if number in (2, 5):
            error = raised(DecodeError, hvd.allreduce, tensor, **options)
            assert isinstance(error, DecodeError)
            messages.append((error.reason, str(error)))
        else:
            result = hvd.allreduce(tensor, **options).numpy()
            assert_same_bits(result, plain(gradients[hvd.rank()], "error", op=hvd.Sum), f"step {number}")
    assert [reason for reason, _ in messages] == ["nonfinite", "over_capacity"], messages
    assert (lhc.statistics.probes, lhc.statistics.sketches) == (3, 3), lhc.statistics
    same_everywhere(messages, "messages")


@case(2, 3, 4)
def fallback_error_in_the_middle() -> None:
    """Ranks that have collected different tensors of a step when they meet the error go on in step after it."""
    lhc = LHC(fallback="error")
    for step in range(6):
        everything = [draw_gradients((i, step), NUMEL, 80 * (1 + i), hvd.size()) for i in range(4)]
        if step == 3:
            everything[2][0][5] = np.nan
        tensors = [torch.from_numpy(gradients[hvd.rank()]) for gradients in everything]
        back = [0, 1, 2, 3] if hvd.rank() == 0 else [3, 2, 1, 0]
        arguments = lhc, tensors, "error in the middle", [0, 1, 2, 3], back
        if step == 3:
            assert isinstance(raised(DecodeError, reduce_by_hand, *arguments), DecodeError)
            continue
        for gradients, result in zip(everything, reduce_by_hand(*arguments), strict=True):
            assert_same_bits(result, np.sum(gradients, axis=0), f"step {step}")


@case(2, 3, 4)
def reductions_that_are_no_sum() -> None:
    """Min, Max, Product and Adasum raise UnsupportedError on every rank, from a probe and from a sketch; then Sum works."""
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        for sketched in (False, True):
            lhc, name = LHC(), f"no sum {op} {sketched}"
            steps = integer_steps(name, NUMEL, [100] * 4)
            if sketched:
                check_steps(name, steps[:2], lhc, hvd.Sum)
            tensor = torch.from_numpy(steps[2][hvd.rank()])
            error = raised(UnsupportedError, hvd.allreduce, tensor, compression=lhc, name=name, op=op)
            assert "op=hvd.Sum" in str(error) and "Compression.none" in str(error), error
            grouped = raised(UnsupportedError, hvd.grouped_allreduce, [tensor] * 2, compression=lhc, name=name, op=op)
            assert str(grouped) == str(error)
            check_steps(name, steps[3:], lhc, hvd.Sum)
            same_everywhere(str(error), name)


@case(2, 3, 4)
def wires_reduced_by_no_sum() -> None:
    """Where Horovod's functions are called by hand, a probe and a sketch show what was done to them."""
    for op in (hvd.Min, hvd.Max, hvd.Product):
        for sketched in (False, True):
            lhc, name = LHC(), f"no sum by hand {op} {sketched}"
            steps = integer_steps(name, NUMEL, [100] * 4)
            if sketched:
                check_steps(name, steps[:2], lhc, hvd.Sum)
            wire, context = lhc.compress(torch.from_numpy(steps[2][hvd.rank()]))
            reduced = hvd.allreduce(wire, name=name, op=op)
            error = raised(UnsupportedError, lhc.decompress, reduced, context)
            assert "op=Sum" in str(error), error
            check_steps(name, steps[3:], lhc, hvd.Sum)
            same_everywhere(str(error), name)


@case(2, 3, 4)
def reducescatter_is_refused() -> None:
    """hvd.reducescatter takes a compressor too, but leaves no rank the whole of a sketch: refused before it is sent."""
    tensor = torch.from_numpy(draw_gradients("scatter", NUMEL, 100, 1)[0])
    lhc = LHC()
    error = raised(UnsupportedError, hvd.reducescatter, tensor, compression=lhc, op=hvd.Sum, name="scatter")
    assert "reducescatter" in str(error) and "Compression.none" in str(error), error
    raised(UnsupportedError, hvd.grouped_reducescatter, [tensor, tensor], compression=lhc, op=hvd.Sum, name="scatter2")
    check_steps("after scatter", integer_steps("after scatter", NUMEL, [100] * 2), lhc, hvd.Sum)


@case(2)
def optimizer_with_adasum() -> None:
    """DistributedOptimizer(op=Adasum) with a compressor is refused in the first backward pass."""
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("adasum", weight)], LHC(), op=hvd.Adasum)
    error = raised(UnsupportedError, lambda: (weight.sum().backward(), optimizer.step()))
    assert "Adasum" in str(error) and "Compression.none" in str(error), error


@case(2, 3, 4)
def reductions_that_are_no_sum_of_small_tensors() -> None:
    """A tensor that goes dense anyway is reduced by Max like without compression."""
    tensor = torch.arange(10.0) * (hvd.rank() + 1)
    result = reduce(tensor, LHC(), "small max", op=hvd.Max)
    assert_same_bits(result, (np.arange(10.0) * hvd.size()).astype(np.float32), "max")


@case(3)
def process_set() -> None:
    """Two of three ranks reduce over their process set, with retries; the third takes no part."""
    if not PAIR.included():
        return
    lhc = LHC(process_set=PAIR)
    for op in (hvd.Sum, hvd.Average):
        steps = [draw_gradients((op, step), NUMEL, 100, 2, "nested", "ordinary") for step in range(6)]
        steps[3][1][0] = np.nan
        steps[4][0][:6000] = 1
        happened = check_steps(f"pair {op}", steps, LHC(process_set=PAIR), op, PAIR)
        assert happened == ["probe", "sketch", "sketch", "nonfinite", "over_capacity", "sketch"], happened
        check_steps(f"pair both {op}", steps, lhc, op, PAIR)


@case(3)
def forgotten_process_set() -> None:
    """A compressor that wasn't told of the process set says so on the ranks of the set, and nobody hangs."""
    if not PAIR.included():
        return
    tensor = torch.from_numpy(draw_gradients("forgotten", NUMEL, 100, 1)[0])
    error = raised(
        UnsupportedError, hvd.allreduce, tensor, compression=LHC(), name="forgotten", op=hvd.Sum, process_set=PAIR
    )
    assert "process_set" in str(error), error


def reduce_by_hand(lhc: LHC, tensors: list[torch.Tensor], name: str, order: list[int], back: list[int]) -> list[Array]:
    """Compress in one order, collect in another, as a DistributedOptimizer does when its hooks fire."""
    handles = {}
    for i in order:
        wire, context = lhc.compress(tensors[i])
        handles[i] = hvd.allreduce_async_(wire, name=f"{name}.{i}", op=hvd.Sum), context
    results = {}
    for i in back:
        handle, context = handles[i]
        results[i] = lhc.decompress(hvd.synchronize(handle), context).numpy()
    return [results[i] for i in range(len(tensors))]


def check_orders(name: str, plant: float) -> None:
    """Six tensors, two of equal content and one of another shape, in an order of each rank's own; step 3 has planted values."""
    lhc = LHC()
    for step in range(6):
        everything = []
        for i in range(6):
            gradients = draw_gradients((name, step, min(i, 4)), NUMEL + (i == 0), 80, hvd.size())
            if step == 3:
                for gradient in gradients:
                    gradient[3] = plant
            everything.append(gradients)
        tensors = [torch.from_numpy(gradients[hvd.rank()]) for gradients in everything]
        shift = 2 * hvd.rank() + 1
        order = [(i + shift) % 6 for i in range(6)]
        back = order[::-1] if hvd.rank() % 2 else order
        results = reduce_by_hand(lhc, tensors, f"{name}", order, back)
        for i, gradients in enumerate(everything):
            expected = np.sum(gradients, axis=0, dtype=np.float32)
            assert_same_bits(results[i], expected, f"{name}: tensor {i}, step {step}")
    assert lhc.statistics.retries == 6, lhc.statistics
    assert lhc.statistics.sketches == 6 * 4, lhc.statistics


@case(2, 3, 4)
def all_retry_in_different_orders() -> None:
    """All tensors of a step hold NaN, and ranks come to them in different order: no deadlock, right results."""
    check_orders("orders nan", np.nan)


@case(2, 3, 4)
def all_overflow_in_different_orders() -> None:
    """The same with an element too large for the plans."""
    check_orders("orders large", 2.0**20)


@case(2, 3, 4)
def ticket_dropped_by_one_caller() -> None:
    """A wire that was compressed but never decompressed does not hold up the plan for ever."""
    lhc = LHC()
    steps = integer_steps("dropped", NUMEL, [100] * 3)
    lhc.compress(torch.from_numpy(steps[0][hvd.rank()]))
    assert check_steps("dropped", steps, lhc, hvd.Sum) == ["probe", "sketch", "sketch"]


@case(2, 3, 4)
def exchanged_contents() -> None:
    """Two tensors of a shape whose contents are exchanged between ranks have equal reduced wires; they are not mixed up.

    Ranks come to them in different order, as where each rank uses one of two parameters: its hook fires first.
    """
    for kind in ("probe", "nonfinite"):
        lhc = LHC()
        for step in range(1 if kind == "probe" else 4):
            first, second = draw_gradients((kind, step), NUMEL, 80, 2)
            if kind == "nonfinite" and step == 3:
                first[3] = np.nan
            mine = [first, second] if hvd.rank() == 0 else [second, first]
            if hvd.rank() > 1:
                mine = [np.zeros(NUMEL, np.float32)] * 2
            expected = first + second
            order = [1, 0] if hvd.rank() == 1 else [0, 1]
            results = reduce_by_hand(lhc, [torch.from_numpy(m) for m in mine], f"exchanged {kind}", order, order)
            for i, result in enumerate(results):
                assert_same_bits(result, expected, f"{kind}: tensor {i}, step {step}")
