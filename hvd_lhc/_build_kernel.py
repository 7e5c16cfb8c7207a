"""Builder of the extension module ``hvd_lhc._lhc_kernel`` (cffi, out of line, API mode); ``setup.py`` runs it.

The declarations are the part of ``csrc/lhc.h`` between two marker lines, so that nothing is declared twice.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

MODULE = "hvd_lhc._lhc_kernel"
#: Relative to the folder of ``setup.py``, which is the current one in every build: setuptools takes no absolute paths.
SOURCES = Path("csrc")
HEADER = "lhc.h"
_MARKED = re.compile(r"/\* cffi: begin \*/\n(.*?)/\* cffi: end \*/", re.DOTALL)


def read_declarations(header: str) -> str:
    """The part of the public header that cffi is to know."""
    parts = _MARKED.findall(header)
    if len(parts) != 1:
        raise SystemExit(f"{HEADER}: expected one part between the two cffi marker lines, found {len(parts)}")
    return str(parts[0])


def compile_arguments() -> list[str]:
    """No contraction of floating-point operations: every machine must give the same bits."""
    if sys.platform == "win32":
        return ["/O2", "/std:c11", "/fp:precise"]
    return ["-O3", "-std=c11", "-fvisibility=hidden", "-ffp-contract=off"]


def make_builder() -> FFI:
    """The builder for all C files of ``csrc/``."""
    builder = FFI()
    builder.cdef(read_declarations((SOURCES / HEADER).read_text(encoding="utf-8")))
    builder.set_source(
        MODULE,
        f'#include "{HEADER}"',
        sources=[path.as_posix() for path in sorted(SOURCES.glob("*.c"))],
        include_dirs=[SOURCES.as_posix()],
        depends=[path.as_posix() for path in sorted(SOURCES.glob("*.h"))],
        extra_compile_args=compile_arguments(),
    )
    return builder


ffibuilder = make_builder()
