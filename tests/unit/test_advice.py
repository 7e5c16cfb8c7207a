"""What is printed below a traceback, where Horovod says that ranks sent something different."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hvd_lhc import advice

MISMATCHES = [
    "Mismatched data types: One rank had type float32, but another rank had type float64.",
    "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [601], but another rank sent a tensor of shape [25].",
]


@pytest.fixture
def printed_before(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an excepthook that stood there before was called with."""
    calls: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(advice, "_excepthook", None)
    monkeypatch.setattr(advice, "_last_shape", None)
    return calls


def end_with(error: BaseException) -> None:
    """What the interpreter does with an exception that nobody caught."""
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize("message", MISMATCHES)
def test_a_mismatch_is_explained(message: str, printed_before: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """By shapes, of which it gives the last; the hook that stood there before prints what it prints."""
    for shape in ([7], [500, 3]):
        advice.note_shape(shape)
    error = RuntimeError(message)
    end_with(error)
    assert printed_before == [(RuntimeError, error, None)]
    said = capsys.readouterr().err
    assert said.startswith("hvd_lhc:") and "different shapes" in said and "shape [500, 3];" in said, said


def test_other_errors_are_left_alone(printed_before: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """They go to the hook that stood there before, and nothing is added."""
    advice.note_shape([7])
    end_with(ValueError("Mismatched parentheses"))
    end_with(KeyboardInterrupt())
    assert len(printed_before) == 2 and capsys.readouterr().err == ""


def test_a_shape_of_unknown_rank(printed_before: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """TensorFlow may trace a function before it knows how many dimensions a tensor has."""
    tf = pytest.importorskip("tensorflow")
    advice.note_shape(tf.TensorShape(None))
    end_with(RuntimeError(MISMATCHES[0]))
    assert len(printed_before) == 1 and "the shape that TensorFlow didn't know" in capsys.readouterr().err
    advice.note_shape(tf.TensorShape([None, 3]))
    end_with(RuntimeError(MISMATCHES[0]))
    assert "the shape [None, 3];" in capsys.readouterr().err
