"""What a graph knows and a rank does alone: traces of its own, functions within functions, factors of a reduction."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from exact import Array, assert_same_bits, draw_gradients, generator
from harness import case
from steps import integer_steps
from tensorflow_common import MODES, as_array, bits_of, check_steps, plain, raised, reducer, same_everywhere

from hvd_lhc.tensorflow import LHC

NUMEL = 40_000
ROWS, ROW = 4000, 16


def train_with_lengths(compression: Any, mode: str, lengths: list[int]) -> list[bytes]:
    """Train two tables of one shape, one five times as dense as the other, with batches of given lengths; return their bits.

    In a graph each length is traced anew, and eagerly Horovod's own function is: the number of indices differs.
    """
    random = generator("tables")
    tables = [tf.Variable(random.normal(size=(ROWS, ROW)).astype(np.float32)) for _ in range(2)]

    def step(words: Any, more: Any) -> None:
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(tf.gather(t, w)) for t, w in zip(tables, (words, more), strict=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=True)
        for table, gradient in zip(tables, tape.gradient(loss, tables), strict=True):
            table.assign_sub(0.01 * gradient)

    run = tf.function(step) if mode == "graph" else step
    for number, length in enumerate(lengths):
        drawn = generator("words", number, hvd.rank())
        run(tf.constant(drawn.integers(0, ROWS, length)), tf.constant(drawn.integers(0, ROWS, 5 * length)))
    return bits_of(tables)


@case(2, 3, 4)
def rank_that_traces_alone() -> None:
    """A rank's last batch is shorter than the others', in every epoch: plans stay in step, and what was learned stays."""
    epoch = [16, 16, 16, 9 if hvd.rank() == 1 else 16]
    for mode in MODES:
        lhc = LHC()
        weights = train_with_lengths(lhc, mode, 3 * epoch)
        assert lhc.statistics.probes == 2 and lhc.statistics.sketches >= 18, lhc.statistics
        same_everywhere(weights, f"weights {mode}")
        if hvd.size() == 2:
            assert weights == train_with_lengths(hvd.Compression.none, mode, 3 * epoch), mode


@case(2, 3, 4)
def lengths_that_always_vary() -> None:
    """Every step is traced anew on every rank, at times of its own: the tensors are still sketched."""
    lengths = [10 + (5 * step + 3 * hvd.rank() * (step % 3)) % 7 for step in range(12)]
    lhc = LHC()
    train_with_lengths(lhc, "graph", lengths)
    assert lhc.statistics.probes == 2 and lhc.statistics.sketches >= 18, lhc.statistics


@case(2, 3, 4)
def function_called_twice_in_another() -> None:
    """A function that reduces, called twice within a step: both calls are exact, and sketched."""
    lhc = LHC()

    @tf.function
    def reduce(tensor: Any) -> Any:
        return hvd.allreduce(tensor, compression=lhc, op=hvd.Sum, name="twice")

    @tf.function
    def step(first: Any, second: Any) -> Any:
        return reduce(first), reduce(second)

    for number in range(8):
        everything = [draw_gradients((i, number), NUMEL, 100 + 200 * i, hvd.size()) for i in range(2)]
        mine = [tf.constant(gradients[hvd.rank()]) for gradients in everything]
        for gradients, result in zip(everything, step(*mine), strict=True):
            assert_same_bits(as_array(result), np.sum(gradients, axis=0), f"step {number}")
    assert lhc.statistics.sketches >= 12, lhc.statistics


@case(2, 3, 4)
def functions_of_one_name() -> None:
    """Functions that share a name, one after the other in a step, each with tensors of its own density."""
    lhc = LHC()
    functions = [reducer(lhc, f"namesake {i}", "graph", op=hvd.Sum) for i in range(2)]
    for step in range(6):
        for i, function in enumerate(functions):
            gradients = draw_gradients((i, step), NUMEL, 100 + 300 * i, hvd.size())
            assert_same_bits(as_array(function(tf.constant(gradients[hvd.rank()]))), np.sum(gradients, axis=0), f"step {step}")
    assert lhc.statistics.sketches >= 8, lhc.statistics


def overflowing(step: int, value: float) -> list[Array]:
    """Gradients of all ranks, in some steps with elements of which two are beyond the type."""
    gradients = [g % 128 for g in draw_gradients(("overflowing", step), NUMEL, 100, hvd.size())]
    if step != 1:
        for gradient in gradients:
            gradient[7] = value
    if step == 2:
        gradients[0][8] = np.nan
    return gradients


@case(2, 3, 4)
def prescaling_prevents_overflow() -> None:
    """Factors that Horovod applies before the sum are applied before it in a dense reduction too: no infinity."""
    for mode in MODES:
        for dtype, value in ((tf.float16, 40_000.0), (tf.float32, 2.0**127)):
            lhc, name = LHC(), f"prescaled {dtype.name} {mode}"
            halved = {"op": hvd.Sum, "prescale_factor": 1 / 4, "postscale_factor": 1.0}
            one = reducer(lhc, name, mode, **halved)

            def group(tensor: Any, lhc: LHC = lhc, halved: dict[str, Any] = halved) -> Any:
                return hvd.grouped_allreduce([tensor, tensor], compression=lhc, **halved)

            many = tf.function(group) if mode == "graph" else group
            for step in range(4):
                tensor = tf.cast(tf.constant(overflowing(step, value)[hvd.rank()]), dtype)
                expected = plain(tensor, name, **halved)
                assert np.isfinite(expected[7])
                for result in (one(tensor), *many(tensor)):
                    assert_same_bits(as_array(result), expected, f"{name}, step {step}")
            assert lhc.statistics.probes and lhc.statistics.retries, lhc.statistics


@case(2)
def predivide_factor_prevents_overflow() -> None:
    """The same from a tape with gradient_predivide_factor."""
    for mode in MODES:
        results = []
        for compression in (LHC(), hvd.Compression.none):
            table = tf.Variable(tf.zeros(NUMEL, tf.float16))

            def step(table: Any = table, compression: Any = compression) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(table[:50] * 40_000.0)
                tape = hvd.DistributedGradientTape(tape, compression=compression, gradient_predivide_factor=4.0)
                return tape.gradient(loss, [table])[0]

            run = tf.function(step) if mode == "graph" else step
            results.append([as_array(run()) for _ in range(3)])
        for ours, others in zip(*results, strict=True):
            assert others[0] == 40_000
            assert_same_bits(ours, others, mode)


@case(2, 3, 4)
def reset_on_all_ranks() -> None:
    """After reset() a rank that has many steps behind it reduces together with one that has none."""
    for mode in MODES:
        lhc = LHC()
        check_steps("reset", integer_steps("reset", NUMEL, [100] * 4), lhc, hvd.Sum, mode)
        lhc.reset()
        fresh = lhc if hvd.rank() == 0 else LHC()
        happened = check_steps("reset", integer_steps("reset again", NUMEL, [200] * 3), fresh, hvd.Sum, mode)
        assert happened == ["probe", "sketch", "sketch"], happened


@case(2)
def step_that_failed_in_the_middle() -> None:
    """A graph that fails between compressing and decompressing, on all ranks, doesn't keep its place from going on."""
    lhc = LHC()

    @tf.function
    def reduce(tensor: Any, fail: Any) -> Any:
        wire, context = lhc.compress(tensor)
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fail), ["failed"])]):
            wire = tf.identity(wire)
        total = hvd.allreduce(wire, op=hvd.Sum, name="by_hand")
        return lhc.decompress(total, context)

    for step in range(5):
        gradients = draw_gradients(("failing", step), NUMEL, 100, hvd.size())
        tensor = tf.constant(gradients[hvd.rank()])
        if step == 2:
            raised(tf.errors.InvalidArgumentError, reduce, tensor, tf.constant(True))
        else:
            assert_same_bits(as_array(reduce(tensor, tf.constant(False))), np.sum(gradients, axis=0), f"step {step}")
    assert lhc.statistics.sketches == 3, lhc.statistics
