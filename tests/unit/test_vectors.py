"""The golden wires of ``tests/vectors``, read by the kernel and by the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_lhc import Codec, DecodeError, Plan, WireError, reference

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "wires.json").read_text())["cases"]
IMPLEMENTATIONS = ("kernel", "reference")

each_case = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def floats(size: int, bits: dict[str, int]) -> np.ndarray[Any, Any]:
    """A float32 array of bit patterns, +0 elsewhere."""
    words = np.zeros(size, np.uint32)
    words[[int(i) for i in bits]] = list(bits.values())
    return words.view(np.float32)


def doubles(size: int, numbers: dict[str, float]) -> np.ndarray[Any, Any]:
    """A wire of its nonzero numbers."""
    wire = np.zeros(size)
    wire[[int(p) for p in numbers]] = list(numbers.values())
    return wire


def reduced_wire(case: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What the reduction made."""
    return doubles(case["wire_size"], {p: float.fromhex(z) for p, z in case["reduced"].items()})


def test_the_stored_wires_are_those_that_the_reference_makes() -> None:
    """``make.py --check``: nobody changed the format, the cases or the file without the others."""
    done = subprocess.run([sys.executable, VECTORS / "make.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@each_implementation
@each_case
def test_encode_makes_the_golden_wires(case: dict[str, Any], implementation: str) -> None:
    """Every rank's wire, number for number."""
    plan = Plan(**case["plan"])
    for rank in case["ranks"]:
        x = floats(plan.numel, rank["gradient"])
        if implementation == "kernel":
            wire = Codec(plan).encode(x, rank=rank["rank"])
        else:
            wire = reference.encode(plan, x, rank["rank"])
        np.testing.assert_array_equal(wire, doubles(case["wire_size"], rank["wire"]))


@each_implementation
@each_case
def test_decode_makes_the_golden_results(case: dict[str, Any], implementation: str) -> None:
    """The result bit for bit, or the refusal, for its reason."""
    plan, wire = Plan(**case["plan"]), reduced_wire(case)
    decode = Codec(plan).decode if implementation == "kernel" else lambda wire, dtype: reference.decode(plan, wire, dtype)
    if "refusal" in case:
        with pytest.raises((DecodeError, WireError)) as caught:
            decode(wire, dtype=case["dtype"])
        assert getattr(caught.value, "reason", "other_plan") == case["refusal"]
        return
    result = decode(wire, dtype=case["dtype"])
    np.testing.assert_array_equal(result.view(np.uint32), floats(plan.numel, case["result"]).view(np.uint32))


@each_implementation
@pytest.mark.parametrize("case", [c for c in CASES if "header" in c], ids=lambda case: case["name"])
def test_headers_say_what_is_stored(case: dict[str, Any], implementation: str) -> None:
    """Every field of the header of a reduced wire."""
    plan, wire = Plan(**case["plan"]), reduced_wire(case)
    header = Codec(plan).read_header(wire) if implementation == "kernel" else reference.read_header(plan, wire)
    expected = {**case["header"], "factor": float.fromhex(case["header"]["factor"])}
    assert {**asdict(header), "factor": float(header.factor)} == expected
