"""Sums and averages through ``hvd.allreduce(compression=LHC())``, eagerly and in a ``tf.function``."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from exact import SUPPORTS, VALUES, Array, assert_same_bits, draw_gradients, draw_rows, exact_sum, rounded
from harness import case
from steps import count, difference, integer_steps
from tensorflow_common import MODES, as_array, check_steps, plain, reducer

from hvd_lhc.tensorflow import LHC, Compression

NUMEL = 50_000


def check_values(mode: str, support: str, values: str) -> None:
    """Sum and Average of gradients of a kind."""
    for op in (hvd.Sum, hvd.Average):
        name = f"{support} {values} {op}"
        steps = [draw_gradients(step, NUMEL, 100, hvd.size(), support, values) for step in range(4)]
        happened = check_steps(name, steps, LHC(), op, mode)
        assert happened == ["probe"] + ["sketch"] * 3, f"{name}, {mode}: {happened}"


@case(2, 3, 4)
def eager_sums() -> None:
    """Eagerly, for all kinds of supports and values: the exact sum and average, rounded once."""
    for support in SUPPORTS:
        for values in VALUES:
            check_values("eager", support, values)


@case(2, 3, 4)
def traced_sums() -> None:
    """In a tf.function, for all kinds of values: the exact sum and average, rounded once."""
    for support, values in zip(SUPPORTS, VALUES, strict=True):
        check_values("graph", support, values)


@case(2, 3, 4)
def traced_subnormals() -> None:
    """Subnormal gradients and sums survive a graph, whose threads may flush such numbers to zero."""
    for support in SUPPORTS:
        check_values("graph", support, "subnormal")


@case(2, 3, 4)
def rows_of_a_table() -> None:
    """Whole nonzero rows, as an embedding table has: the exact average, in the table's shape."""
    for mode in MODES:
        steps = [draw_rows(step, 2000, 32, 8, hvd.size(), "ordinary") for step in range(4)]
        happened = check_steps("rows", steps, LHC(), hvd.Average, mode)
        assert happened == ["probe", "sketch", "sketch", "sketch"], f"{mode}: {happened}"


def check_half(dtype: str) -> None:
    """Sums and averages of a 16-bit type, ordinary and among its subnormals."""
    for mode in MODES:
        for op in (hvd.Sum, hvd.Average):
            for scale in (0, -16 if dtype == "float16" else -130):
                steps = []
                for step in range(4):
                    drawn = draw_gradients((dtype, step), NUMEL, 100, hvd.size(), "nested", "ordinary")
                    for gradient in drawn:
                        for i in np.flatnonzero(gradient):
                            gradient[i] = rounded(Fraction(float(gradient[i])) * Fraction(2) ** scale, dtype)
                    steps.append(drawn)
                name = f"{dtype} {op} {-scale}"
                happened = check_steps(name, steps, LHC(), op, mode, dtype=dtype)
                assert happened == ["probe", "sketch", "sketch", "sketch"], f"{name}: {happened}"


@case(2, 3, 4)
def float16_tensors() -> None:
    """float16: plain Horovod's bits at two ranks, the exact sum rounded once to float16 at three."""
    check_half("float16")


@case(2, 3, 4)
def bfloat16_tensors() -> None:
    """bfloat16, which plain Horovod can't reduce: the exact sum, rounded once to bfloat16."""
    check_half("bfloat16")


@case(2)
def bfloat16_of_dense_and_small_tensors() -> None:
    """bfloat16 tensors that aren't compressed are reduced all the same."""
    for mode in MODES:
        for numel in (10, NUMEL):
            lhc, name = LHC(), f"dense bfloat16 {numel}"
            reduce = reducer(lhc, name, mode, op=hvd.Sum)
            for step in range(3):
                gradients = [np.round(g) for g in draw_gradients((name, step), numel, numel, hvd.size(), "random", "ordinary")]
                tensor = tf.cast(tf.constant(gradients[hvd.rank()]), tf.bfloat16)
                result = reduce(tensor)
                assert result.dtype == tf.bfloat16
                assert_same_bits(as_array(result), np.sum(gradients, axis=0), f"{name}, {mode}, step {step}")
            assert lhc.statistics.sketches == 0 and lhc.statistics.retries == 0


@case(2)
def other_types_pass_through() -> None:
    """float64 and integer tensors come out as from plain Horovod, and no byte is counted for them."""
    lhc = LHC(min_numel=1)
    for dtype in (tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8):
        tensor = tf.cast(tf.range(NUMEL) % 50 * (hvd.rank() + 1), dtype)
        compressed, context = lhc.compress(tensor)
        assert compressed is tensor and context is None
        for mode in MODES:
            result = reducer(lhc, dtype.name, mode, op=hvd.Sum)(tensor)
            assert_same_bits(as_array(result), plain(tensor, dtype.name, op=hvd.Sum), f"{dtype.name}, {mode}")
    assert lhc.statistics.wire_bytes == 0, lhc.statistics


@case(2, 3, 4)
def small_and_empty_tensors_pass_through() -> None:
    """Tensors below min_numel go through as they are; empty tensors and scalars do no harm."""
    lhc = LHC(min_numel=1000)
    for mode in MODES:
        for shape in ((999,), (1, 7), (), (0,), (0, 5), (3, 0)):
            reduce = reducer(lhc, f"small {len(shape)} {sum(shape)}", mode, op=hvd.Sum)
            for dtype in (tf.float32, tf.float16, tf.bfloat16):
                result = reduce(tf.fill(shape, tf.constant(hvd.rank() + 1.0, dtype)))
                expected = np.full(shape, sum(rank + 1.0 for rank in range(hvd.size())), np.float32)
                assert result.dtype == dtype
                assert_same_bits(tf.cast(result, tf.float32).numpy(), expected, f"{shape} {dtype}, {mode}")
    assert lhc.statistics.probes == 0 and lhc.statistics.sketches == 0, lhc.statistics


@case(2)
def scaling_factors() -> None:
    """Prescale and postscale factors, and those of an average with gradient_predivide_factor, act as in plain Horovod."""
    for mode in MODES:
        for op, prescale, postscale in ((hvd.Sum, 0.5, 1.0), (hvd.Sum, 0.25, 2.0), (hvd.Average, 1 / 3, 3.0)):
            lhc, name = LHC(), f"factors {prescale} {postscale}"
            reduce = reducer(lhc, name, mode, op=op, prescale_factor=prescale, postscale_factor=postscale)
            for step in range(4):
                gradients = draw_gradients((name, step), NUMEL, 100, hvd.size(), "random", "ordinary")
                if step == 2:
                    gradients[1][0] = np.nan
                before = count(lhc)
                result = as_array(reduce(tf.constant(gradients[hvd.rank()])))
                if difference(before, count(lhc)) == "sketch":
                    factor = Fraction(1, hvd.size()) if op == hvd.Average else Fraction(prescale) * Fraction(postscale)
                    assert_same_bits(result, exact_sum(gradients, factor), f"{name}, {mode}, step {step}")
                elif op == hvd.Sum:
                    options = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale}
                    expected = plain(tf.constant(gradients[hvd.rank()]), name, **options)
                    assert_same_bits(result, expected, f"{name}, {mode}, step {step}")
            assert lhc.statistics.sketches == 2 and lhc.statistics.refusals == {"nonfinite": 1}, lhc.statistics


@case(2)
def static_shape_is_kept() -> None:
    """What decompress returns in a graph has the static shape of the gradient, known in part or in full."""
    for shape, dtype in (((500, 100), tf.float32), ((None, 100), tf.float32), ((NUMEL,), tf.bfloat16), ((7,), tf.float16)):
        function = reducer(LHC(), "static shape", "graph", op=hvd.Sum)
        concrete = function.get_concrete_function(tf.TensorSpec(shape, dtype))
        assert concrete.output_shapes.as_list() == list(shape), concrete.output_shapes
        assert concrete.output_dtypes == dtype, concrete.output_dtypes


@case(2, 3, 4)
def two_shapes_two_traces() -> None:
    """A function that is traced for two shapes, called with one and the other, sketches both."""
    lhc = LHC()
    reduce = reducer(lhc, "two traces", "graph", op=hvd.Average)
    for step in range(4):
        for numel in (NUMEL, 2 * NUMEL):
            gradients = draw_gradients((step, numel), numel, 100, hvd.size(), "nested", "ordinary")
            result = as_array(reduce(tf.constant(gradients[hvd.rank()])))
            if step:
                assert_same_bits(result, exact_sum(gradients, Fraction(1, hvd.size())), f"{numel}, step {step}")
    assert reduce.experimental_get_tracing_count() == 2
    assert lhc.statistics.sketches == 6 and lhc.statistics.retries == 0, lhc.statistics


@case(2, 3, 4)
def shape_unknown_when_traced() -> None:
    """One trace for any number of rows: each number has its own plan; few rows and none do no harm."""
    lhc = LHC()

    @tf.function(input_signature=[tf.TensorSpec((None, 100), tf.float32)])
    def reduce(tensor: Any) -> Any:
        return hvd.allreduce(tensor, compression=lhc, name="unknown", op=hvd.Sum)

    for step in range(4):
        for rows in (500, 800, 3, 0):
            gradients = draw_rows((step, rows), rows, 100, min(rows, 2), hvd.size())
            result = as_array(reduce(tf.constant(gradients[hvd.rank()])))
            assert_same_bits(result, np.sum(gradients, axis=0), f"{rows} rows, step {step}")
    assert reduce.experimental_get_tracing_count() == 1
    assert lhc.statistics.sketches == 6 and lhc.statistics.retries == 0, lhc.statistics


@case(2)
def variables_and_the_shared_instance() -> None:
    """Compression.lhc is one instance, which reduces variables too; the other two names are Horovod's own."""
    assert Compression.none is hvd.Compression.none and Compression.fp16 is hvd.Compression.fp16
    before = Compression.lhc.statistics.sketches
    variable = tf.Variable(tf.zeros(NUMEL))
    for mode in MODES:
        reduce = reducer(Compression.lhc, f"shared {mode}", mode, op=hvd.Sum)
        for gradients in integer_steps("shared", NUMEL + 1 + len(mode), [100] * 3):
            variable = tf.Variable(gradients[hvd.rank()]) if mode == "eager" else variable
            source = variable if mode == "eager" else tf.constant(gradients[hvd.rank()])
            assert_same_bits(as_array(reduce(source)), np.sum(gradients, axis=0), mode)
    assert Compression.lhc.statistics.sketches == before + 4


def check_several(name: str, reduce: Any, numels: list[int], plant: float | None = None) -> None:
    """Reduce several tensors at once for four steps; in the third, all may hold a planted element."""
    for step in range(4):
        everything = [draw_gradients((name, step, i), numel, min(numel, 80), hvd.size()) for i, numel in enumerate(numels)]
        if step == 2 and plant is not None:
            for gradients in everything:
                gradients[1][3] = plant
        results = reduce([tf.constant(gradients[hvd.rank()]) for gradients in everything])
        for i, (result, gradients) in enumerate(zip(results, everything, strict=True)):
            expected: Array = np.sum(gradients, axis=0, dtype=np.float32)
            assert_same_bits(as_array(result), expected, f"{name}: tensor {i}, step {step}")


@case(2, 3, 4)
def several_tensors_in_one_function() -> None:
    """Tensors that one function reduces, three of one shape, are told apart; so are those that all retry in one step."""
    for plant, retries in ((None, 0), (np.nan, 4), (2.0**30, 4)):
        lhc = LHC()

        @tf.function
        def reduce(tensors: list[Any], lhc: LHC = lhc) -> list[Any]:
            return [hvd.allreduce(tensor, compression=lhc, op=hvd.Sum) for tensor in tensors]

        check_several(f"several {plant}", reduce, [NUMEL, NUMEL, NUMEL, NUMEL + 7], plant)
        assert lhc.statistics.probes == 4 and lhc.statistics.retries == retries, lhc.statistics
        assert lhc.statistics.sketches == 12 - retries, lhc.statistics


@case(2, 3, 4)
def two_compressors_in_one_function() -> None:
    """Two compressors whose tensors go dense in the same step don't mix them up."""
    first, second = LHC(), LHC()

    @tf.function
    def reduce(tensors: list[Any]) -> list[Any]:
        halves = zip(tensors, (first, first, first, second, second, second), strict=True)
        return [hvd.allreduce(tensor, compression=lhc, op=hvd.Sum) for tensor, lhc in halves]

    check_several("two compressors", reduce, [NUMEL] * 6, np.nan)
    for lhc in (first, second):
        assert lhc.statistics.sketches == 6 and lhc.statistics.refusals == {"nonfinite": 3}, lhc.statistics


@case(2, 3, 4)
def grouped_allreduce() -> None:
    """hvd.grouped_allreduce of tensors that are compressed, and of those with small ones among them."""
    for mode in MODES:
        for numels in ([NUMEL, NUMEL, 2 * NUMEL], [NUMEL, 10]):
            lhc = LHC()

            def reduce(tensors: list[Any], lhc: LHC = lhc, mode: str = mode) -> list[Any]:
                results: list[Any] = hvd.grouped_allreduce(tensors, compression=lhc, op=hvd.Sum, name="group")
                return results

            check_several(f"group {mode} {numels}", tf.function(reduce) if mode == "graph" else reduce, numels, np.nan)
            compressed = sum(numel >= NUMEL for numel in numels)
            assert lhc.statistics.sketches == 2 * compressed, lhc.statistics
            assert lhc.statistics.refusals == {"nonfinite": compressed}, lhc.statistics


@case(2, 3, 4)
def loop_in_a_function() -> None:
    """Steps of a loop within one graph, whose gradients don't depend on each other, come one after the other."""
    lhc, steps = LHC(), 8

    @tf.function
    def reduce_all(stacked: Any) -> Any:
        results = tf.TensorArray(tf.float32, steps)
        for i in tf.range(steps):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)  # plain Horovod needs that, too
            results = results.write(i, hvd.allreduce(stacked[i], compression=lhc, name="loop", op=hvd.Sum))
        return results.stack()

    gradients = integer_steps("loop", NUMEL, [100] * steps)
    gradients[4][1][0] = np.nan
    result = as_array(reduce_all(tf.constant(np.stack([step[hvd.rank()] for step in gradients]))))
    assert_same_bits(result, np.stack([np.sum(step, axis=0) for step in gradients]), "loop")
    assert lhc.statistics.sketches >= steps - 3, lhc.statistics


@case(2)
def compressor_as_a_key() -> None:
    """A compressor can be a key of a dictionary, as Horovod uses it: equal to itself alone; copies start afresh."""
    first, second = LHC(), LHC()
    names = {first: "first", second: "second"}
    assert names[first] == "first" and names[second] == "second" and hash(first) == hash(first)
    assert first == first and first != second and first != "first"
    check_steps("key", integer_steps("key", NUMEL, [100] * 2), first, hvd.Sum)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert other != first and other not in names and other.statistics.wire_bytes == 0
