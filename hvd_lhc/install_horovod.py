"""``python -m hvd_lhc install-horovod``: the released Horovod, built for the frameworks of this environment.

Horovod 0.28.1 dates from June 2023 and doesn't build with a torch or a TensorFlow of today as it is. This command fetches
the released sources, makes the few edits that the versions found ask for, builds a wheel, keeps it, installs it, and
proves it with an allreduce in two processes. A second call sees that all is there, and returns at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_lhc._installer import build, environment, proof, recipe
from hvd_lhc._installer.progress import say
from hvd_lhc.errors import InstallError

EPILOG = """\
The user's own HOROVOD_* variables are honoured, e.g. HOROVOD_GPU_OPERATIONS=NCCL, HOROVOD_WITH_MPI=1 or
HOROVOD_WITHOUT_TENSORFLOW=1. Wheels are kept in $XDG_CACHE_HOME/hvd_lhc/horovod (or ~/.cache/hvd_lhc/horovod),
under a name made of all versions involved.
"""


@dataclass(frozen=True)
class Options:
    """The command line."""

    rebuild: bool = False
    wheel_dir: Path | None = None
    verbose: bool = False
    verify: bool = True
    jobs: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line to argparse."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--rebuild", action="store_true", help="build and install even if the right Horovod is there")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="keep wheels and logs here, not in the cache folder")
    parser.add_argument("--verbose", action="store_true", help="show every line of the build")
    parser.add_argument("--no-verify", action="store_true", help="leave out the two-process allreduce at the end")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: by CPUs and free memory)")


def run(arguments: argparse.Namespace) -> int:
    """Entry point of the subcommand.

    Raises:
        InstallError: Horovod could not be built, installed or proven; the message says what is missing.
    """
    if arguments.jobs is not None and arguments.jobs < 1:
        raise InstallError(f"--jobs must be 1 or more, not {arguments.jobs}")
    install(
        Options(
            rebuild=arguments.rebuild,
            wheel_dir=arguments.wheel_dir,
            verbose=arguments.verbose,
            verify=not arguments.no_verify,
            jobs=arguments.jobs,
        )
    )
    return 0


def cache_folder(options: Options, variables: Mapping[str, str]) -> Path:
    """Where wheels, logs and the sdist are kept."""
    if options.wheel_dir is not None:
        return options.wheel_dir.resolve()
    home = variables.get("XDG_CACHE_HOME")
    # The XDG rules: a relative path there is to be ignored.
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    return base / "hvd_lhc" / "horovod"


def install(options: Options) -> None:
    """Bring the right Horovod into this environment, by the shortest way: it is there, a kept wheel, a build."""
    variables = os.environ
    target = environment.describe_target(build.base_variables(variables))
    root = cache_folder(options, variables)
    installed = environment.installed_build()
    if not options.rebuild and installed is not None and environment.serves(installed, target, variables):
        origin = "" if "recipe" in installed else " (not by this command; --rebuild would replace it)"
        say(f"Horovod {recipe.HOROVOD_VERSION} is installed, built for {build.describe(target)}{origin}")
    else:
        if installed is not None:
            say(f"The installed Horovod {installed.get('horovod')} was built for {_built_for(installed)}: replacing it")
        _install_from_wheel(target, root, options)
    if options.verify:
        _prove_once(target, root, again=options.rebuild)


def _built_for(installed: Mapping[str, object]) -> str:
    """What an installed Horovod was built for, in words."""
    parts = [f"{name} {installed[name]}" for name in recipe.FRAMEWORKS if installed.get(name)]
    return " and ".join(parts) or "unknown frameworks"


def _install_from_wheel(target: recipe.Target, root: Path, options: Options) -> None:
    """Take a kept wheel or build one, and install it."""
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"{sys.executable} has no pip; add it with: {sys.executable} -m ensurepip")
    home = root / recipe.cache_key(target)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InstallError(f"can't write to {root} ({error.strerror}); choose another folder with --wheel-dir") from error
    try:
        if options.rebuild:
            build.clear_wheels(home)
        wheel = build.find_wheel(home) or _build(target, root, options)
        build.install_wheel(wheel, build.Log(home / "install.log"))
    except OSError as error:
        raise InstallError(f"{error} (log: {home / 'build.log'})") from error
    finally:
        build.remove_if_empty(home)
    say(f"Installed Horovod {recipe.HOROVOD_VERSION} for {build.describe(target)} from {wheel}")


def _build(target: recipe.Target, root: Path, options: Options) -> Path:
    """Build the wheel, and say how long it took."""
    start = time.monotonic()
    wheel = build.build_wheel(target, root, jobs=options.jobs, verbose=options.verbose)
    say(f"Built in {time.monotonic() - start:.0f} s")
    return wheel


def _prove_once(target: recipe.Target, root: Path, *, again: bool) -> None:
    """Prove the installed Horovod, unless this very installation has been proven before."""
    marker = root / "proven" / _installation_digest(target)
    if marker.is_file() and not again:
        return
    for name in target.frameworks:
        start = time.monotonic()
        proof.prove(name, dict(target.flags))
        say(f"Allreduce of {name} in two processes: right ({time.monotonic() - start:.0f} s)")
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        return  # a read-only cache: the next call proves it again


def _installation_digest(target: recipe.Target) -> str:
    """Name of one installation: where it is, when it was installed, what it was built for."""
    folder = environment.package_folder("horovod")
    if folder is None:
        raise InstallError("pip reports success, but Horovod can't be found; is it installed for another Python?")
    stamp = (folder / "__init__.py").stat().st_mtime_ns
    described = {**recipe.record_of(target), "compiler": None}
    return recipe.digest(json.dumps([str(folder), stamp, described]))
