"""From the sdist on PyPI to a wheel in the cache folder, with a log of everything that ran."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from hvd_lhc._installer import environment, recipe
from hvd_lhc._installer.progress import BuildProgress, say
from hvd_lhc.errors import InstallError

#: Seen: 0.45 GB of sources and objects for both frameworks, some more in temporary files.
NEEDED_DISK_BYTES = 1_500_000_000
#: Seen: 2.4 GB for the largest file (TensorFlow's operations).
MEMORY_PER_JOB_BYTES = 2_500_000_000
#: Lines of the log shown after a failure that we can't explain.
TAIL_LINES = 25

#: What Horovod imports at run time; its ``setup.py`` asks for the same before it builds.
RUNTIME_PACKAGES = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")

_DIAGNOSES = (
    (r"No space left on device", "the disk is full; free some room, or choose another disk with --wheel-dir (and TMPDIR)"),
    (r"Python\.h: No such file", "the Python headers are missing; on Debian and Ubuntu: apt-get install python3-dev"),
    (
        r"Killed signal terminated program|virtual memory exhausted|cannot allocate memory",
        "the compiler ran out of memory; give --jobs 1, or more memory",
    ),
    (r"No CMAKE_CXX_COMPILER could be found", f"CMake found no C++ compiler; {environment.COMPILER_HINT}"),
    (r"No CMAKE_C_COMPILER could be found", f"CMake found no C compiler; {environment.COMPILER_HINT}"),
    (r"Could NOT find NCCL", "NCCL was not found; install it, set HOROVOD_NCCL_HOME, or unset HOROVOD_GPU_OPERATIONS"),
    (
        r"Could NOT find MPI",
        "MPI was not found; install it (on Debian: apt-get install libopenmpi-dev), or unset HOROVOD_WITH_MPI",
    ),
    (
        r"Could NOT find CUDAToolkit",
        "the CUDA toolkit was not found; install it, set HOROVOD_CUDA_HOME, or unset HOROVOD_GPU_OPERATIONS",
    ),
    (
        r"No matching distribution found|Temporary failure in name resolution|Failed to establish a new connection"
        r"|Connection refused|Read timed out|SSLError|ProxyError",
        "pip could not fetch a package; check the network, or pip's index settings",
    ),
)


@dataclass(frozen=True)
class Log:
    """The file that takes the output of every command."""

    path: Path

    def write(self, text: str) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def read(self) -> str:
        """All lines so far."""
        return self.path.read_text(encoding="utf-8", errors="replace")


def run_logged(
    command: Sequence[str],
    log: Log,
    *,
    variables: Mapping[str, str],
    folder: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    failure: str,
) -> None:
    """Run a command, with its output in the log.

    Raises:
        InstallError: it ended with another status than 0; the message begins with ``failure`` and says what is missing.
    """
    log.write("$ " + " ".join(command))
    # A session of its own, so that an interrupt can end compilers that make has started.
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        with log.path.open("a", encoding="utf-8") as file:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                if on_line is not None:
                    on_line(line.rstrip())
        status = process.wait()
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, OSError):
            raise InstallError(f"{failure}: can't write {log.path} ({error.strerror})") from error
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
    if status != 0:
        raise InstallError(f"{failure}: {diagnose(log.read())}\nThe whole log: {log.path}")


def diagnose(text: str) -> str:
    """What a failed build lacked, or, if nothing known, the end of its log."""
    for pattern, explanation in _DIAGNOSES:
        if re.search(pattern, text, re.IGNORECASE):
            return explanation
    header = re.search(r"fatal error: (\S+): No such file or directory", text)
    if header:
        return f"the header {header.group(1)} was not found; this framework may be newer than the recipe (please report it)"
    return "the log ends with\n" + "\n".join("    " + line for line in text.splitlines()[-TAIL_LINES:])


@dataclass(frozen=True)
class Tools:
    """What pip and CMake need, found or fetched; ``variables`` is the environment to build in."""

    cmake: str
    variables: dict[str, str]


def base_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The user's environment, with this Python's scripts on the path and pip quiet."""
    scripts = str(Path(sys.executable).parent)
    return {
        **variables,
        "PATH": os.pathsep.join(filter(None, [scripts, variables.get("PATH")])),
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }


def build_variables(base: Mapping[str, str], target: recipe.Target, jobs: int | None) -> dict[str, str]:
    """The environment of the build itself."""
    variables = {**base, **dict(target.flags)}
    # MAKELEVEL tells the user's own flags from those of a make that called us, whose job server we can't reach.
    users_own = bool(variables.get("MAKEFLAGS")) and "MAKELEVEL" not in variables
    if jobs is not None or not users_own:
        variables["MAKEFLAGS"] = f"-j{jobs or environment.job_count(MEMORY_PER_JOB_BYTES)}"
    for name in ("MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"):
        variables.pop(name, None)
    # The bundled Gloo asks for a policy version that CMake 4 has dropped.
    variables.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
    return variables


def prepare_tools(folder: Path, base: Mapping[str, str], target: recipe.Target, log: Log, jobs: int | None) -> Tools:
    """Find what the build needs in this environment, and fetch the rest into ``folder``, which leaves the environment alone.

    setuptools 81 and later can't build Horovod's ``setup.py``; a CMake is fetched from PyPI where the machine has none.
    """
    variables = build_variables(base, target, jobs)
    lacking = [f"{name}{bound}" for name, bound in (("setuptools", "<81"), ("wheel", "")) if not _fits(name, bound)]
    cmake = environment.find_cmake(base)
    if cmake is None:
        lacking.append("cmake")
    if lacking:
        say(f"Fetching build tools: {', '.join(lacking)}")
        pip = [sys.executable, "-m", "pip", "install", "--target", str(folder), *lacking]
        what = "no cmake >= 3.13 on this machine, and none" if cmake is None else "build tools could not be had"
        run_logged(pip, log, variables=base, failure=f"{what} from PyPI ({', '.join(lacking)})")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), variables.get("PYTHONPATH")]))
    if cmake is None:
        binary = folder / "cmake" / "data" / "bin" / "cmake"
        if not binary.is_file():
            raise InstallError("the cmake package from PyPI holds no program; install CMake >= 3.13 and set HOROVOD_CMAKE")
        cmake = str(binary)
    variables["HOROVOD_CMAKE"] = cmake
    return Tools(cmake, variables)


def _fits(name: str, bound: str) -> bool:
    """Whether a distribution is installed, below a version if ``bound`` is ``"<N"``."""
    try:
        version = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
    return not bound or version < Version(bound[1:])


def install_runtime_packages(base: Mapping[str, str], log: Log) -> None:
    """Install what Horovod itself imports, if it isn't there."""
    names = [*RUNTIME_PACKAGES, *(["setuptools"] if sys.version_info >= (3, 12) else [])]
    lacking = [name for name in names if not _fits(name, "")]
    if lacking:
        say(f"Installing what Horovod needs: {', '.join(lacking)}")
        command = [sys.executable, "-m", "pip", "install", *lacking]
        run_logged(command, log, variables=base, failure=f"could not install {', '.join(lacking)}")


def fetch_sdist(folder: Path, variables: Mapping[str, str], log: Log) -> Path:
    """The released sources, from the cache or from PyPI, with their hash checked.

    Raises:
        InstallError: pip can't get it, or it isn't the released file.
    """
    kept = folder / f"horovod-{recipe.HOROVOD_VERSION}.tar.gz"
    if kept.is_file() and sha256_of(kept) == recipe.SDIST_SHA256:
        return kept
    say(f"Fetching the sources of Horovod {recipe.HOROVOD_VERSION}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        command += ["--dest", scratch, f"horovod=={recipe.HOROVOD_VERSION}"]
        run_logged(command, log, variables=variables, failure="could not fetch the sources of Horovod")
        fetched = Path(scratch) / kept.name
        if not fetched.is_file():
            raise InstallError(f"pip fetched no {kept.name}; see {log.path}")
        check_sdist(fetched)
        os.replace(fetched, kept)
    return kept


def check_sdist(path: Path) -> None:
    """Refuse anything but the released file.

    Raises:
        InstallError: its SHA-256 is another.
    """
    found = sha256_of(path)
    if found != recipe.SDIST_SHA256:
        raise InstallError(
            f"{path.name} is not the released file: its SHA-256 is {found}, expected {recipe.SDIST_SHA256}"
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_wheel(target: recipe.Target, root: Path, *, jobs: int | None, verbose: bool) -> Path:
    """Build the wheel for a target, and keep it under ``root / cache_key(target)``.

    Returns:
        Path of the wheel.

    Raises:
        InstallError: something is missing, or the build failed; the message says what, and names the log file.
    """
    base = base_variables(os.environ)
    home = root / recipe.cache_key(target)
    home.mkdir(parents=True, exist_ok=True)
    log = Log(home / "build.log")
    log.path.write_text("", encoding="utf-8")
    environment.check_toolchain(target, base["PATH"])
    parent = scratch_parent(root)
    environment.check_disk(parent, NEEDED_DISK_BYTES)
    environment.check_importable(target.frameworks)
    install_runtime_packages(base, log)
    with tempfile.TemporaryDirectory(prefix="build-", dir=parent) as scratch_name:
        scratch = Path(scratch_name)
        tools = prepare_tools(scratch / "tools", base, target, log, jobs)
        sdist = fetch_sdist(root, tools.variables, log)
        source = unpack(sdist, scratch)
        for edit in recipe.apply_edits(source, target):
            log.write(f"edited {edit.path}: {edit.why}")
        say(f"Building for {describe(target)} with {target.compiler}: some minutes. Log: {log.path}")
        command = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-v"]
        command += ["--wheel-dir", str(scratch / "wheels")]
        with BuildProgress(verbose=verbose) as progress:
            run_logged(
                command,
                log,
                variables=tools.variables,
                folder=source,
                on_line=progress.feed,
                failure="Horovod could not be built",
            )
        built = find_wheel(scratch / "wheels")
        if built is None:
            raise InstallError(f"pip built no wheel; see {log.path}")
        check_wheel(built, target)
        kept = home / built.name
        os.replace(built, kept)
    return kept


def scratch_parent(root: Path) -> Path:
    """A folder to build in, whose path means itself as a regular expression.

    Horovod's CMake files match paths against the path of the sources; with a ``+`` in it, as in a version of torch, the
    libraries end up elsewhere in the wheel, and nobody notices before the first import.
    """
    for folder in (root, Path(tempfile.gettempdir())):
        if re.fullmatch(r"[A-Za-z0-9_./-]+", str(folder)):
            return folder
    raise InstallError(f"Horovod can't be built under {root}, because of the characters in it; set TMPDIR to a plain path")


def check_wheel(wheel: Path, target: recipe.Target) -> None:
    """Refuse a wheel without the library of a framework.

    Raises:
        InstallError: names the framework.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for framework in target.frameworks:
        if not any(name.startswith(f"horovod/{framework}/mpi_lib") for name in names):
            raise InstallError(f"the wheel was built without the library for {framework}")


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist, and return the folder with its ``setup.py``."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    return folder / f"horovod-{recipe.HOROVOD_VERSION}"


def find_wheel(folder: Path) -> Path | None:
    """The wheel of Horovod in a folder, if there is one."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def install_wheel(wheel: Path, log: Log) -> None:
    """Install a wheel over whatever Horovod is there, and what Horovod needs at run time."""
    base = base_variables(os.environ)
    install_runtime_packages(base, log)
    command = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", str(wheel)]
    run_logged(command, log, variables=base, failure=f"could not install {wheel.name}")


def describe(target: recipe.Target) -> str:
    """A target in words."""
    frameworks = " and ".join(f"{name} {version}" for name, version in target.frameworks.items())
    return f"{frameworks} ({target.python})"


def remove_if_empty(folder: Path) -> None:
    """Leave no empty folder behind after a failure before the first line of a log."""
    with suppress(OSError):
        log = folder / "build.log"
        if log.is_file() and log.stat().st_size == 0:
            log.unlink()
        folder.rmdir()


def clear_wheels(folder: Path) -> None:
    """Forget what was built before, for ``--rebuild``."""
    for wheel in folder.glob("horovod-*.whl"):
        wheel.unlink()
