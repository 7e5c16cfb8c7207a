"""Steps that a sketch can't carry: they end in the exact dense result on all ranks, and the next step works.

Gradients are integers, so that plain Horovod's result doesn't depend on the order of additions.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from exact import Array, assert_same_bits, draw_gradients
from harness import case
from steps import integer_steps
from tensorflow_common import MODES, PAIR, as_array, check_steps, error_in, node_name, plain, raised, reducer, same_everywhere

from hvd_lhc import DecodeError, UnsupportedError
from hvd_lhc.tensorflow import LHC

NUMEL = 60_000


def check_planted(name: str, plant: dict[int, list[tuple[int, float]]], expected: list[str]) -> None:
    """Steps in the third of which some ranks hold planted elements, ``{rank: [(position, value), ...]}``, in both modes."""
    for mode in MODES:
        for op in (hvd.Sum, hvd.Average):
            steps = integer_steps((name, op), NUMEL, [100] * (2 + len(expected)))
            for rank, elements in plant.items():
                for position, value in elements:
                    steps[2][rank][position] = value
            lhc = LHC()
            happened = check_steps(f"{name} {op}", steps, lhc, op, mode)
            assert happened == ["probe", "sketch", *expected], f"{name} {op}, {mode}: {happened}"
            reasons = {reason: expected.count(reason) for reason in expected if reason != "sketch"}
            assert lhc.statistics.refusals == reasons, lhc.statistics


@case(2, 3, 4)
def planted_nan_and_infinity() -> None:
    """NaN or infinity on one rank comes out as from plain Horovod; the step after is a sketch again."""
    for value in (np.nan, -np.inf):
        check_planted(f"planted {value}", {1: [(5, value)]}, ["nonfinite", "sketch"])
    check_planted("both signs", {0: [(5, np.inf)], 1: [(5, -np.inf)]}, ["nonfinite", "sketch"])


@case(2, 3, 4)
def planted_tiny_element() -> None:
    """An element too small for a cell beside the others has a low part: exact, without a retry."""
    check_planted("tiny", {1: [(NUMEL - 1, 2.0**-40)]}, ["sketch", "sketch"])


@case(2, 3, 4)
def planted_huge_element() -> None:
    """An element beyond the plan's exponent: exact dense result, and the plan stays as it was."""
    check_planted("huge", {1: [(0, 2.0**60)]}, ["overflow", "sketch", "sketch"])


@case(2, 3, 4)
def over_capacity_on_one_rank() -> None:
    """Density jumps from 0.1 % to 5 % on one rank: one retry, and the next step has the capacity."""
    for mode in MODES:
        more = [100] * (hvd.size() - 1) + [3000]
        steps = integer_steps("jump", NUMEL, [100, 100, more, more, 100])
        lhc = LHC()
        happened = check_steps("jump", steps, lhc, hvd.Average, mode)
        assert happened == ["probe", "sketch", "over_capacity", "sketch", "sketch"], f"{mode}: {happened}"
        assert lhc.statistics.refusals == {"over_capacity": 1}, lhc.statistics


@case(2, 3, 4)
def union_that_cannot_be_peeled() -> None:
    """Every rank is within the capacity, but their union is not: one retry, and the next step has the capacity."""
    for mode in MODES:
        same = integer_steps("peel same", NUMEL, [1200] * 3, "identical")
        apart = integer_steps("peel apart", NUMEL, [1400] * 2, "disjoint")
        lhc = LHC()
        happened = check_steps("peel", same + apart, lhc, hvd.Sum, mode)
        assert happened == ["probe", "sketch", "sketch", "unpeeled", "sketch"], f"{mode}: {happened}"
        assert lhc.statistics.refusals == {"unpeeled": 1}, lhc.statistics


@case(2)
def half_precision_retries() -> None:
    """float16 and bfloat16: a planted NaN ends in a dense reduction with the right numbers elsewhere."""
    for mode in MODES:
        for dtype in (tf.float16, tf.bfloat16):
            lhc, name = LHC(), f"retry {dtype.name}"
            reduce = reducer(lhc, name, mode, op=hvd.Sum)
            for step in range(4):
                gradients = [g % 128 for g in draw_gradients((name, step), NUMEL, 100, hvd.size(), "nested")]
                expected = np.sum(gradients, axis=0)
                if step == 2:
                    gradients[0][17] = expected[17] = np.nan
                result = tf.cast(reduce(tf.cast(tf.constant(gradients[hvd.rank()]), dtype)), tf.float32)
                assert_same_bits(result.numpy(), tf.cast(tf.cast(expected, dtype), tf.float32).numpy(), f"{name} {step}")
            assert lhc.statistics.refusals == {"nonfinite": 1}, lhc.statistics


@case(2, 3, 4)
def density_up_and_down() -> None:
    """0.1 %, 100 % and back: every step exact, the tensor goes dense and comes back to sketches."""
    counts: list[int | list[int]] = [100] * 3 + [NUMEL] * 4 + [100] * 8
    for mode in MODES:
        happened = check_steps("density", integer_steps("density", NUMEL, counts), LHC(reprobe_steps=3), hvd.Sum, mode)
        assert happened[:3] == ["probe", "sketch", "sketch"] and happened[-3:] == ["sketch"] * 3, f"{mode}: {happened}"
        assert "dense" in happened[4:7], f"{mode}: {happened}"
        retries = [kind for kind in happened if kind not in ("sketch", "dense", "probe")]
        assert len(retries) <= 2, f"{mode}: {happened}"


@case(2, 3, 4)
def fallback_error() -> None:
    """With fallback="error" every rank gets a DecodeError, in a graph within TensorFlow's; the next step works."""
    for mode in MODES:
        lhc = LHC(fallback="error")
        more = [100] * (hvd.size() - 1) + [5000]
        steps = integer_steps("error", NUMEL, [100, 100, 100, 100, 100, more, more, more])
        steps[2][1][9] = np.nan
        reduce = reducer(lhc, "error", mode, op=hvd.Sum)
        for number, gradients in enumerate(steps):
            tensor = tf.constant(gradients[hvd.rank()])
            if number in (2, 5):
                message = str(raised(error_in(mode, DecodeError), reduce, tensor))
                reason = "nonfinite" if number == 2 else "over_capacity"
                assert f"({reason})" in message and "fallback='dense'" in message, message
                assert mode == "eager" or "DecodeError" in message, message
            else:
                expected = plain(tensor, "error", op=hvd.Sum)
                assert_same_bits(as_array(reduce(tensor)), expected, f"{mode}, step {number}")
        assert (lhc.statistics.probes, lhc.statistics.sketches) == (3, 3), lhc.statistics
        same_everywhere(lhc.statistics, "statistics")


@case(2, 3, 4)
def reductions_that_are_no_sum() -> None:
    """Min, Max, Product and Adasum are refused on every rank, with the way out in the message; then Sum works."""
    for mode in MODES:
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            for sketched in (False, True):
                lhc, name = LHC(), f"no sum {op} {sketched}"
                steps = integer_steps(name, NUMEL, [100] * 4)
                if sketched:
                    check_steps(name, steps[:2], lhc, hvd.Sum)
                tensor = tf.constant(steps[2][hvd.rank()])
                reduce = reducer(lhc, name, mode, op=op)
                message = str(raised(UnsupportedError, reduce, tensor))
                assert "op=hvd.Sum or op=hvd.Average" in message and "compression=Compression.none" in message, message
                check_steps(name, steps[3:], lhc, hvd.Sum)


@case(2, 3, 4)
def wires_reduced_by_no_sum() -> None:
    """Where the compressor's functions are called by hand, a wire shows what was done to it, eagerly and in a graph."""
    for mode in MODES:
        for op in (hvd.Min, hvd.Max, hvd.Product):
            lhc, name = LHC(), f"by hand {op} {mode}"
            steps = integer_steps(name, NUMEL, [100] * 3)

            def by_hand(tensor: Any, lhc: LHC = lhc, op: Any = op, name: str = name) -> Any:
                wire, context = lhc.compress(tensor)
                return lhc.decompress(hvd.allreduce(wire, op=op, name=node_name(name)), context)

            call = tf.function(by_hand) if mode == "graph" else by_hand
            message = str(raised(error_in(mode, UnsupportedError), call, tf.constant(steps[0][hvd.rank()])))
            assert "op=Sum or op=Average" in message and "compression=Compression.none" in message, message
            assert mode == "eager" or "UnsupportedError" in message, message
            check_steps(name, steps[1:], lhc, hvd.Sum)


@case(2)
def reducescatter_is_refused() -> None:
    """hvd.reducescatter takes a compressor too, but leaves no rank the whole of a sketch: refused before it is sent."""
    for mode in MODES:
        lhc = LHC()

        def scatter(tensor: Any, lhc: LHC = lhc) -> Any:
            return hvd.reducescatter(tensor, compression=lhc, op=hvd.Sum, name="scatter")

        call = tf.function(scatter) if mode == "graph" else scatter
        tensor = tf.constant(draw_gradients("scatter", NUMEL, 100, 1)[0])
        message = str(raised(UnsupportedError, call, tensor))
        assert "reducescatter" in message and "compression=Compression.none" in message, message


@case(2)
def maximum_of_small_tensors() -> None:
    """A tensor that passes through is reduced by Max like without compression."""
    tensor = tf.range(10.0) * (hvd.rank() + 1.0)
    for mode in MODES:
        result = as_array(reducer(LHC(), "small max", mode, op=hvd.Max)(tensor))
        assert_same_bits(result, (np.arange(10) * hvd.size()).astype(np.float32), mode)


@case(2)
def jit_compile_is_refused() -> None:
    """A function with jit_compile=True can't hold a compressor: an error says so when it is traced."""
    tensor = tf.constant(integer_steps("jit", NUMEL, [100])[0][hvd.rank()])
    lhc = LHC()

    def reduce(tensor: Any) -> Any:
        return hvd.allreduce(tensor, compression=lhc, name="jit", op=hvd.Sum)

    message = str(raised(UnsupportedError, tf.function(reduce, jit_compile=True), tensor))
    assert "jit_compile" in message, message
    nested = tf.function(lambda tensor: tf.function(reduce)(tensor), jit_compile=True)
    assert "jit_compile" in str(raised(UnsupportedError, nested, tensor))
    check_steps("after jit", integer_steps("after jit", NUMEL, [100] * 2), lhc, hvd.Sum, "graph")


@case(3)
def process_set() -> None:
    """Two of three ranks reduce over their process set, with retries; the third takes no part."""
    if not PAIR.included():
        return
    for mode in MODES:
        for op in (hvd.Sum, hvd.Average):
            steps = [draw_gradients((op, step), NUMEL, 100, 2, "nested", "ordinary") for step in range(6)]
            steps[3][1][0] = np.nan
            steps[4][0][:4000] = 1
            happened = check_steps(f"pair {op}", steps, LHC(process_set=PAIR), op, mode, PAIR)
            assert happened == ["probe", "sketch", "sketch", "nonfinite", "over_capacity", "sketch"], f"{mode}: {happened}"


@case(3)
def forgotten_process_set() -> None:
    """A compressor that wasn't told of the process set says so on the ranks of the set, and nobody hangs."""
    if not PAIR.included():
        return
    tensor = tf.constant(draw_gradients("forgotten", NUMEL, 100, 1)[0])
    for mode in MODES:
        reduce = reducer(LHC(), "forgotten", mode, op=hvd.Sum, process_set=PAIR)
        assert "process_set" in str(raised(error_in(mode, UnsupportedError), reduce, tensor))


@case(3)
def rank_that_has_joined() -> None:
    """A rank that runs out of data joins; the others go on, with retries, and all go on together after that.

    Horovod's join works once in a process under TensorFlow: the second returns at once. So this case has one mode.
    """
    lhc = LHC()
    reduce = reducer(lhc, "joined", "graph", op=hvd.Sum)

    def check(steps: list[list[Array]], ranks: int, what: str) -> None:
        for number, gradients in enumerate(steps):
            result = as_array(reduce(tf.constant(gradients[hvd.rank()])))
            assert_same_bits(result, np.sum(gradients[:ranks], axis=0), f"{what}, step {number}")

    check(integer_steps("before", NUMEL, [100] * 4), 3, "before")
    if hvd.rank() < 2:
        check(integer_steps("joined", NUMEL, [100, 4000, 4000]), 2, "joined")
        assert lhc.statistics.refusals == {"over_capacity": 2}, lhc.statistics
    hvd.join()
    check(integer_steps("after", NUMEL, [100] * 4), 3, "after")
    assert lhc.statistics.sketches == 3 + 4 + (hvd.rank() < 2), lhc.statistics
