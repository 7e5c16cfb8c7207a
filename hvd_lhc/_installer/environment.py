"""What this machine and this Python environment have: frameworks, compiler, CMake, an installed Horovod.

Nothing here imports a framework; versions are read from files, so that asking takes milliseconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from hvd_lhc._installer import recipe
from hvd_lhc.errors import InstallError

#: TensorFlow comes under many names, of which one environment has one or two.
_TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "tensorflow-cpu-aws",
    "tensorflow-aarch64",
    "tensorflow-macos",
    "intel-tensorflow",
    "tf-nightly",
    "tf-nightly-cpu",
)

MINIMUM_CMAKE = (3, 13)
COMPILER_HINT = "install a C and C++ compiler, on Debian and Ubuntu: apt-get install build-essential"


def package_folder(name: str) -> Path | None:
    """Folder of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def find_frameworks() -> dict[str, str]:
    """Framework -> version, for torch and TensorFlow, if installed."""
    versions = {"torch": torch_version(), "tensorflow": tensorflow_version()}
    return {name: version for name, version in versions.items() if version is not None}


def torch_version() -> str | None:
    """``torch.__version__``, which tells CPU and CUDA builds apart where the distribution's metadata may not."""
    folder = package_folder("torch")
    if folder is None:
        return None
    source = folder / "version.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    found = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else _version_by_import("torch")


def tensorflow_version() -> str | None:
    """Version of TensorFlow, under whichever name it was installed."""
    if package_folder("tensorflow") is None:
        return None
    for name in _TENSORFLOW_DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return _version_by_import("tensorflow")


def _version_by_import(name: str) -> str:
    """Ask the framework itself, in another process.

    Raises:
        InstallError: it is there and can't be imported.
    """
    code = f"import {name}; print('version:' + {name}.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"^version:(.+)$", done.stdout, re.MULTILINE)
    if found is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(
            f"{name} is installed but can't be imported ({last}); mend or remove it, "
            f"or leave it out with HOROVOD_WITHOUT_{recipe.FRAMEWORKS[name]}=1"
        )
    return found.group(1)


def check_importable(names: Mapping[str, str]) -> None:
    """Import every framework once in another process: Horovod's build does, and its message would be a riddle."""
    for name in names:
        _version_by_import(name)


def describe_target(variables: Mapping[str, str]) -> recipe.Target:
    """What to build in this environment, under these environment variables.

    Raises:
        InstallError: there is neither torch nor TensorFlow, or the user excludes what there is.
    """
    found = find_frameworks()
    wanted = recipe.wanted_frameworks(found, variables)
    if not wanted:
        if found:
            excluded = " and ".join(f"HOROVOD_WITHOUT_{recipe.FRAMEWORKS[name]}" for name in found)
            raise InstallError(f"nothing to build Horovod for: {excluded} excludes all there is ({', '.join(found)})")
        raise InstallError(
            f"neither torch nor TensorFlow is installed for {sys.executable}; Horovod is built for the one it finds. "
            "Install it first: python -m pip install torch (or tensorflow)"
        )
    flags = recipe.build_flags(wanted, variables)
    return recipe.Target(
        torch=wanted.get("torch"),
        tensorflow=wanted.get("tensorflow"),
        python=f"{_interpreter_tag()}{sys.version_info.major}{sys.version_info.minor}",
        platform=re.sub(r"[^\w]", "_", sysconfig.get_platform()),
        compiler=find_compiler(variables),
        flags=tuple(sorted(flags.items())),
    )


def _interpreter_tag() -> str:
    return "cp" if sys.implementation.name == "cpython" else sys.implementation.name


def find_compiler(variables: Mapping[str, str]) -> str:
    """Kind and major version of the C++ compiler CMake will take, e.g. ``"gcc12"``; ``"none"`` if there is none."""
    names = [variables["CXX"].split()[0]] if variables.get("CXX", "").strip() else ["c++", "g++", "clang++"]
    path = next(filter(None, (shutil.which(name, path=variables.get("PATH")) for name in names)), None)
    if path is None:
        return "none"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    first = (done.stdout.splitlines() or [""])[0]
    kind = "clang" if "clang" in first.lower() else "gcc"
    major = re.search(r"(\d+)\.\d+", re.sub(r"\([^)]*\)", "", first))
    return f"{kind}{major.group(1)}" if major else kind


def check_toolchain(target: recipe.Target, path: str | None) -> None:
    """What only the operating system can provide.

    Raises:
        InstallError: no C or C++ compiler, no make, or no Python headers; names the Debian package.
    """
    missing = target.compiler == "none" or not any(shutil.which(name, path=path) for name in ("cc", "gcc", "clang"))
    if missing:
        raise InstallError(f"no C/C++ compiler found: {COMPILER_HINT}")
    if shutil.which("make", path=path) is None:
        raise InstallError("no make found: install it, on Debian and Ubuntu: apt-get install make")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise InstallError(f"no Python headers ({header}): install them, on Debian and Ubuntu: apt-get install {package}")


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Fail early where a build would fail after minutes.

    Raises:
        InstallError: the folder's file system has less room.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise InstallError(
            f"not enough room on the disk of {folder}: {free / 1e9:.1f} GB free, the build needs {needed_bytes / 1e9:.1f}; "
            "free some, or choose another disk with --wheel-dir"
        )


def find_cmake(variables: Mapping[str, str]) -> str | None:
    """The CMake to use: ``HOROVOD_CMAKE`` if set, else the first on the path; ``None`` if that is missing or too old."""
    if variables.get("HOROVOD_CMAKE"):
        return variables["HOROVOD_CMAKE"]
    path = shutil.which("cmake", path=variables.get("PATH"))
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return path if found and (int(found.group(1)), int(found.group(2))) >= MINIMUM_CMAKE else None


def job_count(memory_per_job_bytes: int) -> int:
    """How many compilers to run at once: one per CPU, as far as the free memory goes."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return cpus
    return max(1, min(cpus, int(found.group(1)) * 1024 // memory_per_job_bytes))


def installed_build() -> dict[str, object] | None:
    """What the installed Horovod was built for: our record, or what can be told of somebody else's build.

    Returns:
        ``None`` without Horovod; otherwise a dictionary, with ``"recipe"`` in it only for a build of ours.
    """
    folder = package_folder("horovod")
    if folder is None:
        return None
    record = _read_json(folder / recipe.RECORD_NAME)
    if record is not None:
        return record
    built_for = _read_json(folder / "metadata.json") or {}
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {"horovod": version, "torch": built_for.get("pytorch"), "tensorflow": built_for.get("tensorflow")}


def serves(installed: Mapping[str, object], target: recipe.Target, variables: Mapping[str, str]) -> bool:
    """Whether the installed Horovod can stay: our build for this target, or the user's own for these very frameworks.

    His own is taken at its word as long as he asks for nothing in particular, since replacing it may lose what he built it
    with (NCCL, MPI).
    """
    if "recipe" in installed:
        return recipe.record_matches(installed, target)
    defaults = recipe.build_flags(target.frameworks, {})
    asks = recipe.build_flags(target.frameworks, variables) != defaults
    same = all(installed.get(name) == version for name, version in target.frameworks.items())
    return installed.get("horovod") == recipe.HOROVOD_VERSION and same and not asks


def _read_json(path: Path) -> dict[str, object] | None:
    """A JSON object in a file, or ``None`` if there is no such thing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
