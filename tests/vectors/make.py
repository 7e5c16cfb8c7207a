"""Golden wires, made with ``hvd_lhc.reference`` alone: never with the kernel that they are for.

    python tests/vectors/make.py [--check]

Writes ``wires.json`` beside this file; ``--check`` compares instead, and fails where the stored wires differ.

Of each case: the plan; for every rank its gradient (bit patterns of its nonzero float32, by index) and its wire (nonzero
numbers by position, all of them integers); the reduced wire (as hexadecimal binary64); and what decode makes of it: bit
patterns by index and the header, or the refusal.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cases import CASES, Case

from hvd_lhc import DecodeError, WireError, reference

STORED = Path(__file__).with_name("wires.json")
COMMENT = "Golden wires of format version 3, made by make.py with hvd_lhc.reference. make.py says what is in a case."


def bits_of(x: np.ndarray[Any, Any]) -> dict[str, int]:
    """The bit patterns of the elements that are not +0."""
    words = x.view(np.uint32)
    return {str(i): int(words[i]) for i in np.flatnonzero(words)}


def describe(case: Case) -> dict[str, Any]:
    """A case as it is stored."""
    ranks, wires = [], []
    for rank, elements in case.gradients:
        x = np.zeros(case.plan.numel, np.float32)
        x[list(elements)] = list(elements.values())
        wires.append(reference.encode(case.plan, x, rank))
        numbers = {str(p): int(wires[-1][p]) for p in np.flatnonzero(wires[-1])}
        ranks.append({"rank": rank, "gradient": bits_of(x), "wire": numbers})
    reduced = case.reduce(wires)
    return {
        "name": case.name,
        "comment": case.comment,
        "plan": case.plan._asdict(),
        "wire_size": reference.wire_size(case.plan),
        "ranks": ranks,
        "reduced": {str(p): float(reduced[p]).hex() for p in range(len(reduced)) if reduced[p] != 0},
        "dtype": case.dtype,
        **outcome(case, reduced),
    }


def outcome(case: Case, reduced: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What decode makes of the reduced wire."""
    try:
        result = reference.decode(case.plan, reduced, case.dtype)
    except DecodeError as error:
        return {"refusal": error.reason}
    except WireError:
        return {"refusal": "other_plan"}
    header = vars(reference.read_header(case.plan, reduced))
    return {"result": bits_of(result), "header": {**header, "factor": float(header["factor"]).hex()}}


def render() -> str:
    """The file, one line per rank's wire and so on, so that a difference can be read."""
    text = json.dumps({"comment": COMMENT, "cases": [describe(case) for case in CASES]}, indent=1)
    return text + "\n"


def main() -> int:
    """Write the wires, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is stored, write nothing")
    if not parser.parse_args().check:
        STORED.write_text(render())
        return 0
    if STORED.read_text() == render():
        return 0
    print(f"{STORED.name} is not what make.py makes: run it without --check, and look at the difference", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
