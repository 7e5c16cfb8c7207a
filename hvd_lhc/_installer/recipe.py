"""What to build: the released Horovod, the edits that newer frameworks ask for, and the name of the result.

Pure functions of versions and environment variables. Every edit is a regular expression on the text of the pinned
sdist; one that finds something else than it expects ends the installation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from hvd_lhc.errors import InstallError

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

#: Goes up whenever an edit or a default flag changes, so that no wheel of an older recipe is taken from the cache.
RECIPE_VERSION = 1

#: Lies in the installed package, and says what it was built for.
RECORD_NAME = "hvd_lhc_build.json"

#: Name of a framework here -> what Horovod's variables call it.
FRAMEWORKS = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}

#: Variables that shape the build. All others, HOROVOD_CYCLE_TIME say, matter when training only.
_BUILD_FLAG = re.compile(
    r"HOROVOD_(WITH(OUT)?_\w+|GPU|GPU_\w+|CPU_OPERATIONS|(CUDA|ROCM|NCCL|NVTX|BUILD)_\w+|ALLOW_MIXED_GPU_IMPL"
    r"|DEBUG|MPICXX_SHOW|SKIP_COMPILE)$"
)


@dataclass(frozen=True)
class Target:
    """Everything a Horovod wheel depends on.

    Attributes:
        torch, tensorflow: versions to build for, ``None`` to leave the framework out.
        python: tag of the interpreter, e.g. ``"cp311"``.
        platform: e.g. ``"linux_x86_64"``.
        compiler: kind and major version, e.g. ``"gcc12"``; ``"none"`` if there is none.
        flags: the ``HOROVOD_*`` variables of the build, sorted.
    """

    torch: str | None
    tensorflow: str | None
    python: str
    platform: str
    compiler: str
    flags: tuple[tuple[str, str], ...]

    @property
    def frameworks(self) -> dict[str, str]:
        """Framework -> version, of those to build for."""
        pairs = {"torch": self.torch, "tensorflow": self.tensorflow}
        return {name: version for name, version in pairs.items() if version is not None}


@dataclass(frozen=True)
class Edit:
    """One change to a file of the sdist; ``pattern`` must match exactly once."""

    path: str
    pattern: str
    replacement: str
    why: str


def at_least(version: str, bound: tuple[int, ...]) -> bool:
    """Whether a version has reached a release; pre-releases and local builds of it count (``2.1.0a0+git`` is 2.1)."""
    try:
        release = Version(version).release
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", version)
        if numbers is None:
            raise InstallError(f"can't read the version {version!r}") from None
        release = tuple(int(part) for part in numbers.group().split("."))
    return release[: len(bound)] >= bound


def edits_for(target: Target) -> list[Edit]:
    """The edits this target needs: none but the record for the frameworks of Horovod's own time."""
    edits = []
    if target.torch is not None and at_least(target.torch, (2, 1)):
        edits += [
            Edit(
                path,
                r"(?m)^([ \t]*set\(\s*CMAKE_CXX_STANDARD\s+)14(\s*\))",
                r"\g<1>17\g<2>",
                "headers of torch >= 2.1 need C++17",
            )
            for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
        ]
    if target.torch is not None and _python_version(target.python) >= (3, 12):
        edits.append(
            Edit(
                "horovod/torch/CMakeLists.txt",
                r"from distutils\.sysconfig import get_python_inc; print\(get_python_inc\(\)\)",
                "import sysconfig; print(sysconfig.get_path('include'))",
                "Python >= 3.12 has no distutils",
            )
        )
    if target.tensorflow is not None and at_least(target.tensorflow, (2, 19)):
        edits.append(
            Edit(
                "horovod/tensorflow/CMakeLists.txt",
                r'(?m)^[ \t]*list\(\s*APPEND\s+TF_SOURCES\s+"[^"\n]*/xla_mpi_ops\.cc"\s*\)[ \t]*\n',
                "",
                "TensorFlow >= 2.19 moved the XLA headers; Horovod's XLA operations are off by default",
            )
        )
    edits.append(
        Edit(
            "setup.py",
            r"(?m)^([ \t]*)packages=find_packages\(\),",
            rf"\g<0>\n\g<1>package_data={{'horovod': ['{RECORD_NAME}']}},",
            "the record of this build belongs into the wheel",
        )
    )
    return edits


def _python_version(tag: str) -> tuple[int, int]:
    """``"cp311"`` -> ``(3, 11)``."""
    digits = re.sub(r"\D", "", tag)
    return int(digits[0]), int(digits[1:])


def apply_edit(text: str, edit: Edit) -> str:
    """The text after the edit.

    Raises:
        InstallError: the pattern matches no line, or more than one.
    """
    edited, count = re.subn(edit.pattern, edit.replacement, text)
    if count != 1:
        raise InstallError(
            f"{edit.path} is not what Horovod {HOROVOD_VERSION} was released with: expected one match, found {count}, of "
            f"{edit.pattern!r} (needed because: {edit.why})"
        )
    return edited


def apply_edits(source: Path, target: Target) -> list[Edit]:
    """Edit an unpacked sdist for a target, and put the record of the build into it."""
    edits = edits_for(target)
    for edit in edits:
        path = source / edit.path
        if not path.is_file():
            raise InstallError(f"the Horovod sources have no file {edit.path}")
        path.write_text(apply_edit(path.read_text(encoding="utf-8"), edit), encoding="utf-8")
    (source / "horovod" / RECORD_NAME).write_text(json.dumps(record_of(target), indent=1) + "\n", encoding="utf-8")
    return edits


def wanted_frameworks(found: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The frameworks found, less those the user excludes with ``HOROVOD_WITHOUT_...=1``."""
    return {
        name: version for name, version in found.items() if variables.get(f"HOROVOD_WITHOUT_{FRAMEWORKS[name]}") != "1"
    }


def build_flags(wanted: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The ``HOROVOD_*`` variables of the build: the user's own, and ours where he has said nothing."""
    flags = {name: value for name, value in variables.items() if _BUILD_FLAG.match(name)}
    defaults = {"GLOO": True, "MPI": False, "MXNET": False}
    defaults.update({FRAMEWORKS[name]: name in wanted for name in FRAMEWORKS})
    for part, include in defaults.items():
        if f"HOROVOD_WITH_{part}" not in flags and f"HOROVOD_WITHOUT_{part}" not in flags:
            flags[f"HOROVOD_{'WITH' if include else 'WITHOUT'}_{part}"] = "1"
    return flags


def record_of(target: Target) -> dict[str, object]:
    """What a wheel says about itself, as JSON."""
    return {
        "horovod": HOROVOD_VERSION,
        "recipe": RECIPE_VERSION,
        "torch": target.torch,
        "tensorflow": target.tensorflow,
        "python": target.python,
        "platform": target.platform,
        "compiler": target.compiler,
        "flags": dict(target.flags),
    }


def record_matches(record: Mapping[str, object], target: Target) -> bool:
    """Whether an installed build serves the target. The compiler may have been upgraded, or removed, since."""
    wanted = record_of(target)
    return all(record.get(name) == value for name, value in wanted.items() if name != "compiler")


def cache_key(target: Target) -> str:
    """Name of the folder that holds the wheel: every version involved, safe as a file name."""
    default = build_flags(target.frameworks, {})
    flags = "gloo" if dict(target.flags) == default else "flags" + digest(json.dumps(target.flags))
    parts = [f"horovod{HOROVOD_VERSION}", *(f"{name}{version}" for name, version in target.frameworks.items())]
    parts += [target.python, target.platform, target.compiler, flags, f"r{RECIPE_VERSION}"]
    return "-".join(re.sub(r"[^\w.+]", "_", part) for part in parts)


def digest(text: str) -> str:
    """Eight hexadecimal digits that stand for a text in a file name."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
