"""Sums and averages through ``hvd.allreduce(compression=LHC())``."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import VALUES, Array, assert_same_bits, draw_gradients, draw_rows, draw_values, exact_sum, generator, rounded
from harness import case
from steps import count, difference, integer_steps
from torch_common import check_steps, plain, reduce

from hvd_lhc.torch import LHC, Compression

NUMEL = 50_000


def check_support(support: str) -> None:
    """Sum and Average of gradients with values of every kind."""
    for values in VALUES:
        for op in (hvd.Sum, hvd.Average):
            name = f"{support} {values} {op}"
            steps = [draw_gradients(step, NUMEL, 150, hvd.size(), support, values) for step in range(5)]
            happened = check_steps(name, steps, LHC(), op)
            assert happened == ["probe"] + ["sketch"] * 4, f"{name}: {happened}"


@case(2, 3, 4)
def identical_supports() -> None:
    """Ranks with the same nonzero positions: the exact sum and average, rounded once."""
    check_support("identical")


@case(2, 3, 4)
def disjoint_supports() -> None:
    """Ranks without a common nonzero position: the exact sum and average."""
    check_support("disjoint")


@case(2, 3, 4)
def nested_supports() -> None:
    """The nonzero positions of one rank within those of another: the exact sum and average."""
    check_support("nested")


@case(2, 3, 4)
def rows_of_a_table() -> None:
    """Whole nonzero rows, as an embedding table has: the exact sum and average."""
    for values in VALUES:
        for op in (hvd.Sum, hvd.Average):
            steps = [draw_rows(step, 2000, 32, 8, hvd.size(), values) for step in range(4)]
            happened = check_steps(f"rows {values} {op}", steps, LHC(), op)
            assert happened[-1] == "sketch" and happened[0] == "probe", f"{values} {op}: {happened}"


@case(2, 3, 4)
def cancellation() -> None:
    """Elements that cancel to zero or to their last bit come out exactly."""
    big, small = np.float32(2**20), np.float32(2**-3)
    steps = []
    for step in range(4):
        gradients = draw_gradients(("cancel", step), NUMEL, 100, hvd.size(), "identical", "integers")
        gradients[0][:50] = big
        gradients[1][:50] = -big
        gradients[1][:25] += small
        steps.append(gradients)
    assert check_steps("cancellation", steps, LHC(), hvd.Sum) == ["probe", "sketch", "sketch", "sketch"]


@case(2, 3, 4)
def sum_beyond_the_format() -> None:
    """A sum beyond float32 comes out infinite, and an average just as plain Horovod has it."""
    for op in (hvd.Sum, hvd.Average):
        steps = integer_steps(f"beyond {op}", NUMEL, [100] * 4)
        for gradients in steps[2:]:
            for gradient in gradients:
                gradient[7] = 3e38
        happened = check_steps(f"beyond {op}", steps, LHC(), op)
        assert happened[:2] == ["probe", "sketch"], happened
        assert set(happened[2:]) <= {"overflow", "dense"}, happened


@case(2, 3, 4)
def scaling_factors() -> None:
    """prescale_factor and postscale_factor act as in plain Horovod; the result is off by an ulp at most."""
    random = generator("factors")
    for prescale, postscale in ((0.5, 1.0), (3.0, 1.0), (1 / 3, 1.0), (1.0, 1 / 7), (1 / 3, 5.0), (1e-3, 1e3)):
        lhc = LHC()
        factor = Fraction(prescale) * Fraction(postscale)
        for step in range(3):
            name = f"factors {prescale} {postscale}"
            gradients = draw_gradients((name, step), NUMEL, 100, hvd.size(), "random", "ordinary")
            gradients[hvd.size() - 1][:10] = draw_values("integers", 10, random)
            before = count(lhc)
            options = {"op": hvd.Sum, "prescale_factor": prescale, "postscale_factor": postscale}
            result = reduce(gradients[hvd.rank()], lhc, name, **options)
            if difference(before, count(lhc)) != "sketch":
                assert step == 0, f"{name}: {lhc.statistics}"
                continue
            exact = exact_sum(gradients, factor)
            bits = np.abs(result.view(np.int32).astype(np.int64) - exact.view(np.int32))
            assert bits.max() <= 1, f"{name}: off by {bits.max()} ulp"
            if prescale in (0.5, 3.0):  # the factor is known exactly
                assert_same_bits(result, exact, name)
            if prescale == 0.5 and hvd.size() == 2:
                assert_same_bits(result, plain(gradients[hvd.rank()], name, **options), name)


@case(2, 3, 4)
def predivide_factors_of_an_average() -> None:
    """An average with gradient_predivide_factor, as DistributedOptimizer passes it on, is rounded once."""
    for predivide in (2.0, 3.0, 7.0):
        lhc = LHC()
        for step in range(3):
            gradients = draw_gradients((predivide, step), NUMEL, 100, hvd.size(), "random", "ordinary")
            before = count(lhc)
            options = {"op": hvd.Average, "prescale_factor": 1 / predivide, "postscale_factor": predivide}
            result = reduce(gradients[hvd.rank()], lhc, f"predivide {predivide}", **options)
            if step:
                assert difference(before, count(lhc)) == "sketch", lhc.statistics
                exact = exact_sum(gradients, Fraction(1, hvd.size()))
                assert_same_bits(result, exact, f"predivide {predivide}")


@case(2, 3, 4)
def factors_of_a_retry() -> None:
    """A step that is retried dense is scaled like any other."""
    for prescale, op in ((0.5, hvd.Sum), (0.25, hvd.Average)):
        lhc, name = LHC(), f"retry factors {prescale}"
        for step, gradients in enumerate(integer_steps(name, NUMEL, [100] * 4)):
            if step == 2:
                gradients[1][0] = np.nan
            options = {"op": op, "prescale_factor": prescale, "postscale_factor": 2.0}
            result = reduce(gradients[hvd.rank()], lhc, name, **options)
            if hvd.size() == 2 or op == hvd.Sum:  # three ranks average in one more rounding without compression
                assert_same_bits(result, plain(gradients[hvd.rank()], name, **options), f"{name} {step}")
        assert lhc.statistics.refusals == {"nonfinite": 1}, lhc.statistics


def check_half(torch_dtype: torch.dtype, dtype: str) -> None:
    """Sums and averages of a 16-bit type."""

    def convert(gradient: Array) -> torch.Tensor:
        return torch.from_numpy(gradient).to(torch_dtype)

    for op in (hvd.Sum, hvd.Average):
        for scale in (1.0, 2.0**-14):
            steps = []
            for step in range(4):
                drawn = draw_gradients((dtype, step), NUMEL, 100, hvd.size(), "nested", "ordinary")
                steps.append([convert(gradient * np.float32(scale)).float().numpy() for gradient in drawn])
            name = f"{dtype} {op} {scale}"
            happened = check_steps(name, steps, LHC(), op, prepare=convert, dtype=dtype)
            assert happened == ["probe", "sketch", "sketch", "sketch"], f"{name}: {happened}"


@case(2, 3, 4)
def float16_tensors() -> None:
    """float16: plain Horovod's bits at two ranks, the exact sum rounded once to float16 at three."""
    check_half(torch.float16, "float16")


@case(2, 3, 4)
def bfloat16_tensors() -> None:
    """bfloat16, which plain Horovod can't reduce: the exact sum, rounded once to bfloat16."""
    check_half(torch.bfloat16, "bfloat16")


@case(2, 3, 4)
def float16_sum_beyond_the_format() -> None:
    """A float16 sum above 65504 comes out infinite, as without compression."""
    steps = integer_steps("half beyond", NUMEL, [100] * 4)
    for gradients in steps[2:]:
        for gradient in gradients:
            gradient[3] = 60_000

    def convert(gradient: Array) -> torch.Tensor:
        return torch.from_numpy(gradient).to(torch.float16)

    happened = check_steps("half beyond", steps, LHC(), hvd.Sum, prepare=convert, dtype="float16")
    assert happened[:3] == ["probe", "sketch", "overflow"], happened


@case(2, 3, 4)
def bfloat16_of_dense_and_small_tensors() -> None:
    """bfloat16 tensors that aren't compressed are reduced all the same."""
    for numel in (10, NUMEL):
        lhc = LHC()
        for step in range(3):
            gradients = draw_gradients((numel, step), numel, numel, hvd.size(), "random", "ordinary")
            gradients = [np.round(gradient).astype(np.float32) for gradient in gradients]
            tensor = torch.from_numpy(gradients[hvd.rank()]).to(torch.bfloat16)
            result = reduce(tensor, lhc, f"dense bfloat16 {numel}", op=hvd.Sum)
            expected = [rounded(Fraction(float(total)), "bfloat16") for total in np.sum(gradients, axis=0)]
            assert_same_bits(result, np.array(expected, np.float32), f"{numel} {step}")
        assert lhc.statistics.sketches == 0 and lhc.statistics.retries == 0


@case(2, 3, 4)
def other_types_pass_through() -> None:
    """float64 and integer tensors come out as from plain Horovod, and no byte is counted for them."""
    lhc = LHC(min_numel=1)
    for dtype in (torch.float64, torch.int32, torch.int64, torch.uint8):
        if dtype == torch.uint8:
            compressed, context = lhc.compress(torch.ones(NUMEL, dtype=dtype))
            assert compressed.dtype == dtype and context is None
            continue
        tensor = torch.arange(NUMEL).to(dtype) * (hvd.rank() + 1)
        for step in range(2):
            result = reduce(tensor, lhc, f"{dtype}", op=hvd.Sum)
            assert_same_bits(result, plain(tensor, f"{dtype}", op=hvd.Sum), f"{dtype} {step}")
    assert lhc.statistics.wire_bytes == 0, lhc.statistics


@case(2, 3, 4)
def small_tensors_stay_dense() -> None:
    """Tensors below min_numel go through as they are; empty tensors and scalars do no harm."""
    lhc = LHC(min_numel=1000)
    for step in range(3):
        for shape in ((999,), (1, 7), (), (0,), (0, 5), (3, 0)):
            tensor = torch.full(shape, float(hvd.rank() + step))
            result = hvd.allreduce(tensor, compression=lhc, name=f"small {shape}", op=hvd.Sum)
            expected = torch.full(shape, float(sum(rank + step for rank in range(hvd.size()))))
            assert torch.equal(result, expected), f"{shape}: {result}"
    assert lhc.statistics.wire_bytes == lhc.statistics.dense_bytes == 3 * 4 * (999 + 7 + 1), lhc.statistics
    assert lhc.statistics.probes == 0


@case(2, 3, 4)
def all_zero_and_scattered_layouts() -> None:
    """Gradients without any nonzero, and transposed (non-contiguous) ones, whose layout need not match their shape."""
    zeros = [np.zeros(NUMEL, np.float32)] * hvd.size()
    nonzero = draw_gradients("layout", NUMEL, 50, hvd.size())
    happened = check_steps("zeros", [zeros, zeros, zeros], LHC(), hvd.Average)
    assert happened == ["probe", "sketch", "sketch"], happened
    happened = check_steps("zeros first", [zeros, zeros, nonzero, nonzero, zeros, nonzero], LHC(), hvd.Average)
    assert happened.count("sketch") >= 2, happened
    steps: list[list[Any]] = [draw_rows(step, 400, 100, 5, hvd.size()) for step in range(4)]
    transposed: Callable[[Array], Any] = lambda gradient: torch.from_numpy(gradient).t()  # noqa: E731
    turned = [[gradient.T for gradient in gradients] for gradients in steps]
    lhc = LHC()
    for step, gradients in enumerate(steps):
        tensor = transposed(gradients[hvd.rank()])
        assert not tensor.is_contiguous()
        result = hvd.allreduce(tensor, compression=lhc, name="transposed", op=hvd.Sum)
        assert_same_bits(result.contiguous().numpy(), exact_sum(turned[step]), f"transposed, step {step}")
    assert lhc.statistics.sketches == 3, lhc.statistics


@case(2)
def shared_instance() -> None:
    """Compression.lhc is one instance that reduces; the other two names are Horovod's own."""
    assert Compression.none is hvd.Compression.none and Compression.fp16 is hvd.Compression.fp16
    before = Compression.lhc.statistics.sketches
    check_steps("shared", integer_steps("shared", NUMEL, [100] * 3), Compression.lhc, hvd.Sum)
    assert Compression.lhc.statistics.sketches == before + 2
