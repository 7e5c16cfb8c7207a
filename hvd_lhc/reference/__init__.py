"""The reference: ``docs/wire-format.md`` in plain Python integers and fractions, slow and right by inspection.

Written from that document alone, independently of the C kernel, so that tests can hold the two against each other bit
for bit. Nothing here is meant for training. Sections named in comments are the document's.
"""

from __future__ import annotations

from hvd_lhc.reference.decode import decode
from hvd_lhc.reference.encode import encode
from hvd_lhc.reference.header import ReferenceHeader, read_header
from hvd_lhc.reference.layout import Geometry, PlanLike, geometry, wire_size
from hvd_lhc.reference.mixing import mix
from hvd_lhc.reference.placement import cells_of_key, key_of_cell
from hvd_lhc.reference.rounding import exact_sum, round_once

__all__ = [
    "Geometry",
    "PlanLike",
    "ReferenceHeader",
    "cells_of_key",
    "decode",
    "encode",
    "exact_sum",
    "geometry",
    "key_of_cell",
    "mix",
    "read_header",
    "round_once",
    "wire_size",
]
