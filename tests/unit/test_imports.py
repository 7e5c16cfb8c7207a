"""What importing the package loads, and what it says when Horovod isn't there."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a line in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_core_loads_no_framework() -> None:
    """``import hvd_lhc`` needs neither Horovod nor torch nor TensorFlow."""
    done = run_python("import sys, hvd_lhc; print({'horovod', 'torch', 'tensorflow'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_an_adapter_without_horovod_says_how_to_get_it(framework: str) -> None:
    """An ImportError that names the command, not only the missing module."""
    done = run_python(f"import sys; sys.modules['horovod'] = None; import hvd_lhc.{framework}")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: hvd_lhc."), done
    assert f"horovod.{framework}" in last and "python -m hvd_lhc install-horovod" in last
