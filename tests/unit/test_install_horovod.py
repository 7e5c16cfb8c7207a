"""The installer's decisions, edits, names and messages; without network, without Horovod."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_lhc import __main__ as cli
from hvd_lhc import install_horovod
from hvd_lhc._installer import build, environment, progress, proof, recipe
from hvd_lhc.errors import InstallError

# Lines of Horovod 0.28.1 as released, with a neighbour each.
ROOT_CMAKE = "project(horovod CXX)\n\nset(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
TORCH_CMAKE = (
    'execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"\n'
    "                OUTPUT_VARIABLE PYTHON_INCLUDE_PATH OUTPUT_STRIP_TRAILING_WHITESPACE)\n"
    'if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")\n'
    "    set(CMAKE_CXX_STANDARD 14)\n"
    "endif()\n"
)
TENSORFLOW_CMAKE = (
    'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")\n'
    'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'
    "\n# Create library\n"
)
SETUP = "setup(name='horovod',\n      version=get_package_version(),\n      packages=find_packages(),\n"
FILES = {
    "CMakeLists.txt": ROOT_CMAKE,
    "horovod/torch/CMakeLists.txt": TORCH_CMAKE,
    "horovod/tensorflow/CMakeLists.txt": TENSORFLOW_CMAKE,
    "setup.py": SETUP,
}

BOTH = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}


def make_target(torch: str | None = "2.13.0+cpu", tensorflow: str | None = "2.21.0", **changes: object) -> recipe.Target:
    """A target on this machine's platform, with default flags."""
    pairs = {"torch": torch, "tensorflow": tensorflow}
    wanted = {name: version for name, version in pairs.items() if version is not None}
    flags = tuple(sorted(recipe.build_flags(wanted, {}).items()))
    target = recipe.Target(torch, tensorflow, "cp311", "linux_x86_64", "gcc12", flags)
    return replace(target, **changes)  # type: ignore[arg-type]


def edited(target: recipe.Target) -> dict[str, str]:
    """The released lines after all edits for a target."""
    files = dict(FILES)
    for edit in recipe.edits_for(target):
        files[edit.path] = recipe.apply_edit(files[edit.path], edit)
    return files


class TestEdits:
    """Which edits, decided by version, and what they do to the released lines."""

    @pytest.mark.parametrize(
        ("torch", "standard"),
        [("2.0.1", 14), ("2.1.0", 17), ("2.1.0a0+git", 17), ("2.13.0+cpu", 17), ("3.0", 17), ("1.13.1", 14)],
    )
    def test_cxx_standard_follows_torch(self, torch: str, standard: int) -> None:
        """Torch 2.1 and everything after it gets C++17, in both files, and nothing else changes there."""
        files = edited(make_target(torch=torch, tensorflow=None))
        for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
            assert files[path] == FILES[path].replace("STANDARD 14", f"STANDARD {standard}")

    @pytest.mark.parametrize(
        ("tensorflow", "kept"), [("2.15.1", True), ("2.18.1", True), ("2.19.0", False), ("2.21.0", False), ("3.0", False)]
    )
    def test_xla_operations_follow_tensorflow(self, tensorflow: str, kept: bool) -> None:
        """TensorFlow 2.19 and later loses the one line with xla_mpi_ops.cc."""
        files = edited(make_target(torch=None, tensorflow=tensorflow))
        lines = TENSORFLOW_CMAKE.splitlines(keepends=True)
        expected = TENSORFLOW_CMAKE if kept else "".join(line for line in lines if "xla" not in line)
        assert files["horovod/tensorflow/CMakeLists.txt"] == expected
        assert files["CMakeLists.txt"] == ROOT_CMAKE

    def test_distutils_goes_with_python_3_12(self) -> None:
        """Python 3.12 has no distutils, which Horovod's CMake file imports; the quotes stay balanced."""
        path = "horovod/torch/CMakeLists.txt"
        assert "distutils" in edited(make_target())[path]
        text = edited(make_target(python="cp312"))[path]
        assert "-c \"import sysconfig; print(sysconfig.get_path('include'))\"\n" in text

    def test_record_is_packaged(self) -> None:
        """setup.py takes the record into the wheel, and stays valid Python."""
        text = edited(make_target())["setup.py"] + ")"
        compile(text, "setup.py", "exec")
        assert f"package_data={{'horovod': ['{recipe.RECORD_NAME}']}}," in text

    @pytest.mark.parametrize("text", ["", ROOT_CMAKE * 2, ROOT_CMAKE.replace("14", "11")])
    def test_unexpected_text_is_refused(self, text: str) -> None:
        """A pattern that matches never, or twice, ends the installation, naming the file and the reason."""
        edit = recipe.edits_for(make_target())[0]
        with pytest.raises(InstallError, match=r"CMakeLists\.txt is not what Horovod .* C\+\+17"):
            recipe.apply_edit(text, edit)

    def test_files_are_edited_in_place(self, tmp_path: Path) -> None:
        """apply_edits changes the unpacked files and leaves the record; a missing file is named."""
        for name, text in FILES.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        recipe.apply_edits(tmp_path, make_target())
        assert "STANDARD 17" in (tmp_path / "CMakeLists.txt").read_text()
        assert '"2.13.0+cpu"' in (tmp_path / "horovod" / recipe.RECORD_NAME).read_text()
        (tmp_path / "setup.py").unlink()
        (tmp_path / "CMakeLists.txt").write_text(ROOT_CMAKE)
        for name in ("horovod/torch/CMakeLists.txt", "horovod/tensorflow/CMakeLists.txt"):
            (tmp_path / name).write_text(FILES[name])
        with pytest.raises(InstallError, match=r"no file setup\.py"):
            recipe.apply_edits(tmp_path, make_target())

    @pytest.mark.parametrize(
        ("version", "bound", "expected"),
        [
            ("2.1", (2, 1), True),
            ("2.10.0", (2, 9), True),
            ("2.9", (2, 19), False),
            ("2.1-odd build", (2, 1), True),
            ("3", (2, 1), True),
        ],
    )
    def test_versions_compare_as_numbers(self, version: str, bound: tuple[int, ...], expected: bool) -> None:
        """2.10 comes after 2.9; odd local versions are read as far as they are numbers."""
        assert recipe.at_least(version, bound) is expected

    def test_no_version_at_all(self) -> None:
        """A version without a number is an error of ours."""
        with pytest.raises(InstallError, match="can't read the version"):
            recipe.at_least("unknown", (2, 1))


class TestFlags:
    """Horovod's variables: ours where the user has said nothing."""

    def test_defaults(self) -> None:
        """Gloo, no MPI, no MXNet, and exactly the frameworks found."""
        assert recipe.build_flags({"torch": "2.13.0"}, {}) == {
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
        }

    def test_the_users_own_win(self) -> None:
        """HOROVOD_WITH_MPI=1 is kept and not contradicted; training variables and others are no business of the build."""
        own = {
            "HOROVOD_WITH_MPI": "1",
            "HOROVOD_WITHOUT_GLOO": "1",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": "/opt/nccl",
            "HOROVOD_CYCLE_TIME": "2",
            "HOROVOD_RANK": "0",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOME": "/root",
        }
        flags = recipe.build_flags(BOTH, own)
        assert "HOROVOD_WITHOUT_MPI" not in flags and "HOROVOD_WITH_GLOO" not in flags
        assert {name for name in flags if name in own} == set(list(own)[:4])

    def test_excluded_framework(self) -> None:
        """HOROVOD_WITHOUT_TENSORFLOW=1 leaves it out of versions, edits and proof alike."""
        own = {"HOROVOD_WITHOUT_TENSORFLOW": "1"}
        wanted = recipe.wanted_frameworks(BOTH, own)
        assert wanted == {"torch": "2.13.0+cpu"}
        assert "HOROVOD_WITH_TENSORFLOW" not in recipe.build_flags(wanted, own)


class TestNames:
    """The cache key holds every version involved."""

    def test_key_is_readable(self) -> None:
        """A default build is named by its versions."""
        assert recipe.cache_key(make_target()) == (
            f"horovod0.28.1-torch2.13.0+cpu-tensorflow2.21.0-cp311-linux_x86_64-gcc12-gloo-r{recipe.RECIPE_VERSION}"
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {"torch": "2.13.1"},
            {"torch": None},
            {"tensorflow": None},
            {"tensorflow": "2.20.0"},
            {"python": "cp312"},
            {"platform": "linux_aarch64"},
            {"compiler": "clang16"},
            {"flags": (("HOROVOD_WITH_MPI", "1"),)},
        ],
    )
    def test_everything_counts(self, changes: dict[str, object]) -> None:
        """Another version, platform, compiler or flag is another key."""
        assert recipe.cache_key(replace(make_target(), **changes)) != recipe.cache_key(make_target())  # type: ignore[arg-type]

    def test_key_is_a_file_name(self) -> None:
        """Whatever stands in a version, the key is one path component."""
        key = recipe.cache_key(make_target(torch="2.1/../x y"))
        assert "/" not in key and " " not in key

    def test_cache_folder(self, tmp_path: Path) -> None:
        """XDG_CACHE_HOME if absolute, else ~/.cache; --wheel-dir before both."""
        default = install_horovod.Options()
        assert install_horovod.cache_folder(default, {"XDG_CACHE_HOME": "/c"}) == Path("/c/hvd_lhc/horovod")
        assert install_horovod.cache_folder(default, {"XDG_CACHE_HOME": "c"}) == Path.home() / ".cache/hvd_lhc/horovod"
        given = install_horovod.Options(wheel_dir=tmp_path)
        assert install_horovod.cache_folder(given, {"XDG_CACHE_HOME": "/c"}) == tmp_path


class TestInstalled:
    """When an installed Horovod may stay."""

    def test_own_build_for_these_versions(self) -> None:
        """Our record must name these very versions; an upgraded compiler doesn't matter."""
        record = recipe.record_of(make_target())
        assert environment.serves(record, make_target(), {})
        assert environment.serves(record, make_target(compiler="gcc13"), {})
        assert not environment.serves(record, make_target(torch="2.13.1+cpu"), {})
        assert not environment.serves(record, make_target(tensorflow=None), {})
        assert not environment.serves({**record, "recipe": recipe.RECIPE_VERSION + 1}, make_target(), {})

    def test_build_of_somebody_else(self) -> None:
        """A Horovod built by hand stays if its frameworks are these and the user asks for nothing in particular."""
        installed = {"horovod": "0.28.1", **BOTH}
        assert environment.serves(installed, make_target(), {})
        assert not environment.serves(installed, make_target(torch="2.12.0+cpu"), {})
        assert not environment.serves({**installed, "horovod": "0.27.0"}, make_target(), {})
        assert not environment.serves(installed, make_target(), {"HOROVOD_WITH_MPI": "1"})

    def test_metadata_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Our record is preferred to Horovod's metadata.json, which has a trailing dummy."""
        package = tmp_path / "horovod"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "metadata.json").write_text('{\n"tensorflow": "2.21.0",\n"pytorch": "2.13.0+cpu",\n"dummy": "none"\n}')
        monkeypatch.setattr(environment, "package_folder", lambda name: package)
        found = environment.installed_build()
        assert found is not None and "recipe" not in found and found["torch"] == "2.13.0+cpu"
        (package / recipe.RECORD_NAME).write_text('{"recipe": 1}')
        assert environment.installed_build() == {"recipe": 1}

    def test_torch_version_is_read_without_import(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch/version.py tells the local version; typed or not."""
        monkeypatch.setattr(environment, "package_folder", lambda name: tmp_path)
        for line in ("__version__ = '2.13.0+cu130'", '__version__: str = "2.13.0+cu130"'):
            (tmp_path / "version.py").write_text(f"from typing import Optional\n{line}\ndebug = False\n")
            assert environment.torch_version() == "2.13.0+cu130"


class TestMissing:
    """What is missing is said in one sentence, with the package to install."""

    def test_no_framework(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither torch nor TensorFlow: says so, and what to install."""
        monkeypatch.setattr(environment, "find_frameworks", dict)
        with pytest.raises(InstallError, match=r"neither torch nor TensorFlow is installed .* pip install torch"):
            environment.describe_target({})

    def test_all_excluded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Excluding the only framework names the variable to blame."""
        monkeypatch.setattr(environment, "find_frameworks", lambda: {"torch": "2.13.0"})
        with pytest.raises(InstallError, match=r"HOROVOD_WITHOUT_PYTORCH excludes all there is \(torch\)"):
            environment.describe_target({"HOROVOD_WITHOUT_PYTORCH": "1"})

    def test_no_compiler(self, tmp_path: Path) -> None:
        """An empty path has no compiler and no make."""
        assert environment.find_compiler({"PATH": str(tmp_path)}) == "none"
        with pytest.raises(InstallError, match=r"no C/C\+\+ compiler found.*build-essential"):
            environment.check_toolchain(make_target(compiler="none"), os.environ["PATH"])
        with pytest.raises(InstallError, match="compiler"):
            environment.check_toolchain(make_target(), str(tmp_path))

    def test_no_make_and_no_headers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make and Python.h are looked for before minutes go by."""
        add_program(tmp_path, "gcc", "")
        with pytest.raises(InstallError, match="no make found"):
            environment.check_toolchain(make_target(), str(tmp_path))
        add_program(tmp_path, "make", "")
        monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(InstallError, match=r"no Python headers .*Python\.h.*apt-get install python3\.\d+-dev"):
            environment.check_toolchain(make_target(), str(tmp_path))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "gcc12"),
            ("c++ (GCC) 13.1.1 20230614", "gcc13"),
            ("Ubuntu clang version 18.1.3 (1ubuntu1)", "clang18"),
        ],
    )
    def test_compiler_is_read(self, text: str, expected: str, tmp_path: Path) -> None:
        """The first line of --version, as distributions print it."""
        add_program(tmp_path, "my-c++", text)
        assert environment.find_compiler({"PATH": str(tmp_path), "CXX": "my-c++ -m64"}) == expected

    @pytest.mark.parametrize(("version", "fits"), [("3.12.4", False), ("3.13.0", True), ("3.25.1", True), ("4.2.0", True)])
    def test_cmake_must_fit(self, version: str, fits: bool, tmp_path: Path) -> None:
        """CMake below 3.13 counts as none; HOROVOD_CMAKE is taken as it is."""
        assert environment.find_cmake({"PATH": str(tmp_path)}) is None
        program = add_program(tmp_path, "cmake", f"cmake version {version}")
        assert environment.find_cmake({"PATH": str(tmp_path)}) == (str(program) if fits else None)
        assert environment.find_cmake({"PATH": "", "HOROVOD_CMAKE": "/opt/cmake"}) == "/opt/cmake"

    def test_no_cmake_to_be_had(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No cmake here and none from PyPI is said in these words."""
        monkeypatch.setattr(environment, "find_cmake", lambda variables: None)
        monkeypatch.setattr(sys, "executable", str(add_program(tmp_path, "python", "No matching distribution found", 1)))
        log = build.Log(tmp_path / "build.log")
        with pytest.raises(InstallError, match=r"no cmake >= 3\.13 on this machine, and none from PyPI"):
            build.prepare_tools(tmp_path / "tools", dict(os.environ), make_target(), log, None)

    def test_disk(self, tmp_path: Path) -> None:
        """More than any disk has."""
        with pytest.raises(InstallError, match=r"not enough room .* GB free.*--wheel-dir"):
            environment.check_disk(tmp_path, 10**21)

    def test_wrong_sdist(self, tmp_path: Path) -> None:
        """Sources with another hash are refused."""
        path = tmp_path / "horovod-0.28.1.tar.gz"
        path.write_bytes(b"not Horovod")
        with pytest.raises(InstallError, match=f"not the released file.*expected {recipe.SDIST_SHA256}"):
            build.check_sdist(path)


class TestBuild:
    """Running a build: log, progress, diagnosis."""

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("/tmp/x.s: Fatal error: can't write: No space left on device", "the disk is full"),
            ("x.h:1:10: fatal error: Python.h: No such file or directory", "Python headers are missing"),
            ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory; give --jobs 1"),
            ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "build-essential"),
            ("Could NOT find NCCL (missing: NCCL_INCLUDE_DIR)", "HOROVOD_NCCL_HOME"),
            ("ERROR: No matching distribution found for horovod==0.28.1", "check the network"),
            ("a.cc:3:10: fatal error: xla/foo.h: No such file or directory", "xla/foo.h was not found"),
            ("something nobody has seen before", "the log ends with\n    something nobody"),
        ],
    )
    def test_diagnosis(self, line: str, reason: str) -> None:
        """Known failures are explained, others shown."""
        assert reason in build.diagnose(line)

    def test_failure_names_the_log(self, tmp_path: Path) -> None:
        """The command, its output and its failure all end up where the message says."""
        log = build.Log(tmp_path / "build.log")
        lines: list[str] = []
        command = [sys.executable, "-c", "print('one'); print('two'); raise SystemExit(3)"]
        with pytest.raises(InstallError, match=r"(?s)no luck: the log ends with.*two.*The whole log: .*build\.log"):
            build.run_logged(command, log, variables=os.environ, on_line=lines.append, failure="no luck")
        assert lines == ["one", "two"]
        assert log.read().splitlines()[-2:] == ["one", "two"]

    def test_progress_lines(self) -> None:
        """CMake's percentages are found with their file; other lines are not progress."""
        line = "  [ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/half.cc.o"
        assert progress.parse_step(line) == (42, "pytorch: half.cc")
        assert progress.parse_step("[100%] Built target pytorch") == (100, "Built target pytorch")
        assert progress.parse_step("cc -c half.cc # [ 42%]") is None

    def test_plain_progress(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without a terminal: one line per tenth."""
        with progress.BuildProgress() as shown:
            for percent in (1, 2, 9, 10, 11, 25, 26, 100, 100):
                shown.feed(f"[{percent:3d}%] Built target x")
        numbers = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
        assert numbers == [1, 10, 25, 100]

    def test_folder_to_build_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Never below a path with a plus sign, which Horovod's CMake files take for a regular expression."""
        monkeypatch.setattr(build.tempfile, "gettempdir", lambda: "/tmp")
        assert build.scratch_parent(Path("/home/me/.cache/hvd_lhc")) == Path("/home/me/.cache/hvd_lhc")
        assert build.scratch_parent(Path("/home/c++/.cache")) == Path("/tmp")
        monkeypatch.setattr(build.tempfile, "gettempdir", lambda: "/t m p")
        with pytest.raises(InstallError, match="set TMPDIR to a plain path"):
            build.scratch_parent(Path("/home/c++/.cache"))

    def test_wheel_without_library(self, tmp_path: Path) -> None:
        """A wheel that lacks a framework's library isn't kept."""
        wheel = tmp_path / "horovod-0.28.1-x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so", "")
            archive.writestr("tmp/a/horovod/tensorflow/mpi_lib.cpython-311-x86_64-linux-gnu.so", "")
        build.check_wheel(wheel, make_target(tensorflow=None))
        with pytest.raises(InstallError, match="without the library for tensorflow"):
            build.check_wheel(wheel, make_target())

    def test_makeflags(self) -> None:
        """The user's own MAKEFLAGS are kept; those of a make that called us, with its job server, are not."""
        target = make_target()
        assert build.build_variables({"MAKEFLAGS": "-j3"}, target, None)["MAKEFLAGS"] == "-j3"
        assert build.build_variables({"MAKEFLAGS": "-j3"}, target, 5)["MAKEFLAGS"] == "-j5"
        under_make = build.build_variables({"MAKEFLAGS": "w --jobserver-auth=3,4", "MAKELEVEL": "1"}, target, None)
        assert "jobserver" not in under_make["MAKEFLAGS"] and "MAKELEVEL" not in under_make
        assert under_make["HOROVOD_WITH_GLOO"] == "1" and under_make["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"

    def test_jobs_follow_memory(self) -> None:
        """At least one compiler, and no more than fit the memory."""
        assert environment.job_count(10**18) == 1
        assert environment.job_count(1) >= 1


class TestInstall:
    """The ways through install(), with the steps that need a network replaced."""

    @pytest.fixture
    def steps(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Records the steps taken, in an environment with torch and a cache folder of its own."""
        taken: list[str] = []
        package = tmp_path / "site" / "horovod"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        folders = {"horovod": package}

        def build_wheel(target: recipe.Target, root: Path, *, jobs: int | None, verbose: bool) -> Path:
            taken.append("build")
            wheel = root / recipe.cache_key(target) / "horovod-0.28.1-x.whl"
            wheel.write_text("")
            return wheel

        monkeypatch.setattr(environment, "find_frameworks", lambda: {"torch": "2.13.0"})
        monkeypatch.setattr(environment, "installed_build", lambda: None)
        monkeypatch.setattr(environment, "package_folder", folders.get)
        monkeypatch.setattr(build, "build_wheel", build_wheel)
        monkeypatch.setattr(build, "install_wheel", lambda wheel, log: taken.append("install"))
        monkeypatch.setattr(proof, "prove", lambda framework, flags: taken.append(f"prove {framework}"))
        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            monkeypatch.delenv(name)
        return taken

    def test_build_then_cache_then_nothing(self, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """First a build, then the kept wheel, then nothing at all; --rebuild starts over."""
        options = install_horovod.Options(wheel_dir=tmp_path / "cache")
        install_horovod.install(options)
        assert steps == ["build", "install", "prove torch"]
        steps.clear()
        install_horovod.install(options)
        assert steps == ["install"]  # another environment would be proven; this one has been
        steps.clear()
        record = recipe.record_of(environment.describe_target(os.environ))
        monkeypatch.setattr(environment, "installed_build", lambda: record)
        install_horovod.install(options)
        assert steps == []
        install_horovod.install(replace(options, rebuild=True))
        assert steps == ["build", "install", "prove torch"]

    def test_proof_that_failed_is_repeated(self, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An installation whose proof failed isn't taken for good by the next call."""

        def fail(framework: str, flags: dict[str, str]) -> None:
            raise InstallError("wrong sum")

        options = install_horovod.Options(wheel_dir=tmp_path / "cache")
        with monkeypatch.context() as patched:
            patched.setattr(proof, "prove", fail)
            with pytest.raises(InstallError, match="wrong sum"):
                install_horovod.install(options)
        steps.clear()
        install_horovod.install(options)
        assert steps == ["install", "prove torch"]

    def test_no_verify(self, steps: list[str], tmp_path: Path) -> None:
        """--no-verify leaves the proof out."""
        install_horovod.install(install_horovod.Options(wheel_dir=tmp_path / "cache", verify=False))
        assert steps == ["build", "install"]

    def test_folder_that_cant_be_written(self, steps: list[str], tmp_path: Path) -> None:
        """A file in the place of the cache folder: says what to do."""
        (tmp_path / "cache").write_text("")
        with pytest.raises(InstallError, match=r"can't write to .* --wheel-dir"):
            install_horovod.install(install_horovod.Options(wheel_dir=tmp_path / "cache"))


class TestCommandLine:
    """python -m hvd_lhc."""

    def test_our_errors_become_one_line(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Status 1 and the message, no traceback."""

        def fail(options: install_horovod.Options) -> None:
            raise InstallError("no compiler")

        monkeypatch.setattr(install_horovod, "install", fail)
        assert cli.main(["install-horovod"]) == 1
        assert capsys.readouterr().err == "install-horovod: no compiler\n"
        assert cli.main(["install-horovod", "--jobs", "0"]) == 1

    def test_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every option reaches the installer."""
        seen: list[install_horovod.Options] = []
        monkeypatch.setattr(install_horovod, "install", seen.append)
        words = ["install-horovod", "--rebuild", "--wheel-dir", "w", "--verbose", "--no-verify", "--jobs", "3"]
        assert cli.main(words) == 0
        assert seen == [install_horovod.Options(rebuild=True, wheel_dir=Path("w"), verbose=True, verify=False, jobs=3)]

    def test_imports_neither_kernel_nor_frameworks(self) -> None:
        """The installer must run before any of them is there."""
        code = (
            "import sys, hvd_lhc.__main__ as m, hvd_lhc.install_horovod\n"
            "m.make_parser('install-horovod')\n"
            "heavy = {'torch', 'tensorflow', 'horovod', 'numpy', 'hvd_lhc._kernel', 'hvd_lhc._lhc_kernel'}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"


def add_program(folder: Path, name: str, output: str, status: int = 0) -> Path:
    """A program that prints a line."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    path.chmod(0o755)
    return path
