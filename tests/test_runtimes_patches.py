"""The patches of Horovod's source and the key of its wheel: nothing may be skipped or taken for the same in silence."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from hvdkit.errors import RunError
from hvdkit.runtimes import cuda, machine, patches, pins, wheel
from hvdkit.runtimes.target import Target

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent


def _patch(folder: Path, diff: str, needed_for: str = "all") -> Path:
    head = "Symptom: it fails\nCause: a fault\n  of long standing\nUpstream: none known\nTest: this\n"
    path = folder / "01-test.patch"
    path.write_text(f"{head}For: {needed_for}\n\n{diff}")
    return path


DIFF = """diff --git a/CMakeLists.txt b/CMakeLists.txt
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1,2 +1,2 @@
 project(X)
-set(X 14)
+set(X 17)
diff --git a/new/file.txt b/new/file.txt
new file mode 100644
--- /dev/null
+++ b/new/file.txt
@@ -0,0 +1 @@
+made
"""


def test_a_patch_is_read_with_its_head_and_applies(tmp_path: Path) -> None:
    patch = patches._read(_patch(tmp_path, DIFF, "torch >=2.1; mxnet >=1.9"))
    assert (patch.symptom, patch.cause) == ("it fails", "a fault of long standing")
    (tmp_path / "CMakeLists.txt").write_text("project(X)\nset(X 14)\n")
    patches.apply(tmp_path, [patch])
    assert (tmp_path / "CMakeLists.txt").read_text() == "project(X)\nset(X 17)\n"
    assert (tmp_path / "new" / "file.txt").read_text() == "made\n"


@pytest.mark.parametrize(
    "text", ["project(X)\nset(X 15)\n", "project(Y)\nset(X 14)\n", "\nproject(X)\nset(X 14)\n", "project(X)\n", None]
)
def test_a_patch_that_does_not_fit_stops_with_its_name_and_the_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "CMakeLists.txt").write_text(text)
    with pytest.raises(RunError, match=r"^01-test\.patch does not fit this Horovod: .*CMakeLists\.txt"):
        patches.apply(tmp_path, [patches._read(_patch(tmp_path, DIFF))])
    assert text is None or (tmp_path / "CMakeLists.txt").read_text() == text


def test_a_patch_is_for_any_of_its_frameworks(tmp_path: Path) -> None:
    patch = patches._read(_patch(tmp_path, DIFF, "torch >=2.1; tensorflow >=2.16"))
    for versions in ({"torch": "2.13.0+cpu"}, {"tensorflow": "2.16.1"}, {"torch": "1.13", "tensorflow": "2.21.0rc1"}):
        assert patch.is_for(versions), versions
    for versions in ({"torch": "2.0.1"}, {"tensorflow": "2.15.1"}, {"mxnet": "1.9.1"}, {}):
        assert not patch.is_for(versions), versions


def test_every_patch_says_what_it_is_for_and_what_shows_it() -> None:
    for patch in patches.every():
        assert all((patch.symptom, patch.cause, patch.upstream, patch.test)), patch.name
        assert {one.name for one in patch.frameworks} <= {pin.module for pin in pins.RUNTIMES.values()}
        test = patch.test.split(":")[0]
        assert not test.startswith(("tests/", "benchmarks/")) or (ROOT / test).exists(), patch.name


def test_a_patch_that_is_not_for_all_comes_last_for_its_files() -> None:
    """Without it, the line numbers of later patches would be wrong, unless it leaves the number of lines as it is."""
    seen: dict[str, str] = {}
    for patch in patches.every():
        for file, added in re.findall(r"^\+\+\+ b/(\S+)\n(?:@@ .*\n)?((?:[-+ @].*\n)*)", patch.diff, re.MULTILINE):
            assert file not in seen, f"{patch.name} changes {file} after {seen[file]}, which is not for all builds"
            lines = added.splitlines()
            grows = sum(line.startswith("+") for line in lines) != sum(line.startswith("-") for line in lines)
            if patch.frameworks and grows:
                seen[file] = patch.name


def test_the_fingerprint_is_of_the_diffs_alone() -> None:
    first, *others = patches.every()
    assert patches.fingerprint([dataclasses.replace(first, cause="another"), *others]) == patches.fingerprint(
        patches.every()
    )
    assert patches.fingerprint(others) != patches.fingerprint(patches.every())


PYTHON = Path("/runtime/bin/python")
TORCH = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}


def _key() -> str:
    return wheel.key(wheel.wheel_ingredients(Target(Path(sys.executable), TORCH)))


def test_the_wheel_key_is_stable() -> None:
    assert _key() == _key()


def test_the_wheel_key_changes_with_each_thing_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {_key()}

    def is_new(what: str) -> None:
        key = _key()
        assert key not in seen, f"the key is the same with another {what}"
        seen.add(key)

    first, *others = patches.every()
    monkeypatch.setattr(patches, "every", lambda: (dataclasses.replace(first, diff=first.diff + "\n"), *others))
    is_new("patch")
    monkeypatch.setattr(pins, "BUILD_TOOLS", ("cmake==3.31.11",))
    is_new("CMake")
    monkeypatch.setattr(pins, "HOROVOD_VERSION", "0.28.2")
    is_new("Horovod")
    monkeypatch.setattr(machine, "compiler", lambda: "g++ 99")
    is_new("compiler")
    monkeypatch.setattr(machine, "mpi", lambda: "mpirun (Open MPI) 99")
    is_new("MPI")
    monkeypatch.setattr(machine, "python_abi", lambda python: "3.99.0 cpython-399")
    is_new("Python")
    monkeypatch.setattr(machine, "architecture", lambda: "x86_64 none")
    is_new("processor")
    for variable in ("HOROVOD_BUILD_ARCH_FLAGS", "CXXFLAGS", "CC"):
        monkeypatch.setenv(variable, "-something")
        is_new(variable)
    for versions in ({"torch": "2.13.0"}, TORCH | {"tensorflow": "2.21.0"}):
        assert wheel.key(wheel.wheel_ingredients(Target(Path(sys.executable), versions))) not in seen
    for version in ("13.0", "13.1"):
        found = cuda.Installed(version, Path("/cuda"))
        monkeypatch.setattr(cuda, "find", lambda python=None, found=found: cuda.Cuda(found, found))
        on_gpu = wheel.key(wheel.wheel_ingredients(Target(Path(sys.executable), TORCH, gpu=True)))
        assert on_gpu not in seen, "the key is the same with another CUDA"
        seen.add(on_gpu)


def test_the_wheel_key_stays_with_what_only_matters_to_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    assert _key() == before


def test_a_user_may_refuse_an_mpi_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mpi", lambda: "mpirun (Open MPI) 99")
    assert wheel.flags(Target(None, {"mxnet": "1.9.1"}))["HOROVOD_WITH_MPI"] == "1"
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")
    refused = wheel.flags(Target(None, {"mxnet": "1.9.1"}))
    assert refused["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in refused


def test_an_mpi_without_its_headers_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Debian's openmpi-bin without libopenmpi-dev."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.mpi.__wrapped__() is None
    for name, says in (("mpirun", "echo mpirun 4.1.4"), ("mpicxx", "[ $1 != -E ] || { echo no mpi.h >&2; exit 1; }")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    assert machine.mpi.__wrapped__() is None
    (tmp_path / "mpicxx").write_text("#!/bin/sh\n")
    assert machine.mpi.__wrapped__() == "mpirun 4.1.4"


def test_pips_cuda_is_linked_from_its_lib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvcc looks in lib64, which pip's packages do not have."""
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart_static.a").touch()
    here = cuda.Cuda(cuda.Installed("13.0", tmp_path), cuda.Installed("2.27", Path("/nccl")))
    monkeypatch.setattr(cuda, "find", lambda python=None: here)
    target = Target(PYTHON, TORCH, gpu=True)
    assert wheel.build_environment(target, Path("/tools"))["LIBRARY_PATH"] == f"{tmp_path}/lib"
    monkeypatch.setenv("LIBRARY_PATH", "/mine")
    assert wheel.build_environment(target, Path("/tools"))["LIBRARY_PATH"] == f"{tmp_path}/lib:/mine"
    (tmp_path / "lib64").mkdir()
    assert wheel.build_environment(target, Path("/tools"))["LIBRARY_PATH"] == "/mine"


def test_a_gpu_build_takes_nccl_for_all_and_never_beside_a_single_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc, nccl = cuda.Installed("13.0", Path("/cuda")), cuda.Installed("2.27", Path("/nccl"))
    monkeypatch.setattr(cuda, "find", lambda python=None: cuda.Cuda(nvcc, nccl))
    monkeypatch.setenv("HOROVOD_GPU_ALLREDUCE", "NCCL")
    built_with = wheel.build_environment(Target(PYTHON, TORCH, gpu=True), Path("/tools"))
    assert built_with["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert built_with["HOROVOD_NCCL_LINK"] == "SHARED"
    assert built_with["HOROVOD_NCCL_HOME"] == "/nccl"
    assert built_with["CUDA_HOME"] == built_with["HOROVOD_CUDA_HOME"] == "/cuda"
    assert built_with["PATH"].startswith("/tools/bin:/cuda/bin:"), "before another nvcc"
    assert "HOROVOD_GPU_ALLREDUCE" not in built_with
    on_cpu = wheel.build_environment(Target(PYTHON, TORCH), Path("/tools"))
    assert "HOROVOD_GPU_OPERATIONS" not in on_cpu


def test_a_build_names_its_framework_and_leaves_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITH_MXNET", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    built_with = wheel.build_environment(Target(PYTHON, {"tensorflow": "2.21.0"}), Path("/tools"))
    assert built_with["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert built_with["HOROVOD_WITHOUT_PYTORCH"] == built_with["HOROVOD_WITHOUT_MXNET"] == "1"
    assert "HOROVOD_WITH_MXNET" not in built_with
    assert built_with["PYTHONPATH"] == "/tools"
    assert built_with["PATH"].startswith("/tools/bin:/runtime/bin:")
