"""Turns ``tests/vectors/wires.json`` into C arrays for ``test_kernel.c``, on standard output. Standard library only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[1] / "vectors" / "wires.json"
INDEXES = {"none": "LHC_INDEX_NONE", "keyed": "LHC_INDEX_KEYED", "bitmap": "LHC_INDEX_BITMAP"}
PRECISIONS = {"lossless": "LHC_LOSSLESS", "bounded": "LHC_BOUNDED"}
FORMATS = {"float32": "LHC_FLOAT32", "float16": "LHC_FLOAT16", "bfloat16": "LHC_BFLOAT16"}


def array(name: str, kind: str, items: dict[str, Any]) -> str:
    """A C array of places and what stands there; never empty, which C11 doesn't allow."""
    rows = ", ".join(f"{{{place}u, {value}}}" for place, value in items.items()) or "{0, 0}"
    return f"static const {kind} {name}[] = {{{rows}}};"


def double(text: str) -> str:
    """A hexadecimal binary64 as C writes it."""
    return {"nan": "(double)NAN", "inf": "(double)INFINITY", "-inf": "-(double)INFINITY"}.get(text, text)


def plan(fields: dict[str, Any]) -> str:
    """The initializer of an ``lhc_plan``."""
    values = {**fields, "index": INDEXES[fields["index"]], "precision": PRECISIONS[fields["precision"]]}
    values["seed"] = f"UINT64_C({values['seed']})"
    return "{" + ", ".join(f".{name} = {value}" for name, value in values.items()) + "}"


def main() -> int:
    """Write all cases and a table of them."""
    cases = json.loads(STORED.read_text())["cases"]
    table = []
    for number, case in enumerate(cases):
        ranks = []
        for i, rank in enumerate(case["ranks"]):
            gradient, wire = f"gradient_{number}_{i}", f"wire_{number}_{i}"
            print(array(gradient, "element", {p: f"{bits}u" for p, bits in rank["gradient"].items()}))
            print(array(wire, "number", {p: f"{value}.0" for p, value in rank["wire"].items()}))
            name = -1 if rank["rank"] is None else rank["rank"]
            ranks.append(f"{{{name}, {gradient}, {len(rank['gradient'])}, {wire}, {len(rank['wire'])}}}")
        print(f"static const rank_case ranks_{number}[] = {{{', '.join(ranks)}}};")
        print(array(f"reduced_{number}", "number", {p: double(z) for p, z in case["reduced"].items()}))
        result = case.get("result", {})
        print(array(f"result_{number}", "element", {p: f"{bits}u" for p, bits in result.items()}))
        status = f"LHC_ERR_{case['refusal'].upper()}" if "refusal" in case else "LHC_OK"
        table.append(
            f'{{"{case["name"]}", {plan(case["plan"])}, {case["wire_size"]}u, ranks_{number}, {len(ranks)}, '
            f"reduced_{number}, {len(case['reduced'])}, {FORMATS[case['dtype']]}, {status}, result_{number}, {len(result)}}}"
        )
    print("static const golden_case golden_cases[] = {\n" + ",\n".join(table) + "};")
    return 0


if __name__ == "__main__":
    sys.exit(main())
