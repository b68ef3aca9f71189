"""The edits of Horovod's source and the key of its wheel: nothing may be skipped or taken for the same in silence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hvdkit.errors import RunError
from hvdkit.runtimes import edits, machine, pins, wheel
from hvdkit.runtimes.edits import EDITS, Edit


def _source(folder: Path, chosen: tuple[Edit, ...]) -> Path:
    """A source in which every edit's anchor is found exactly as often as expected."""
    for edit in chosen:
        path = folder / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        path.write_text(text + "\n// between\n" + edit.anchor * edit.count)
    return folder


@pytest.mark.parametrize("runtime", EDITS)
def test_every_edit_of_a_runtime_is_applied(tmp_path: Path, runtime: str) -> None:
    source = _source(tmp_path, EDITS[runtime])
    edits.apply(source, EDITS[runtime])
    for edit in EDITS[runtime]:
        assert edit.replacement in (source / edit.file).read_text(), edit.reason


def test_an_edit_whose_anchor_is_gone_fails_with_file_and_anchor(tmp_path: Path) -> None:
    source = _source(tmp_path, EDITS["pytorch"])
    (source / "horovod/common/gloo/gloo_context.cc").write_text("void nothing() {}\n")
    with pytest.raises(RunError, match=r"gloo_context\.cc.*device_attr\.iface.*found 0 times, expected 1"):
        edits.apply(source, EDITS["pytorch"])


def test_an_edit_whose_anchor_is_there_once_too_often_changes_nothing(tmp_path: Path) -> None:
    edit = Edit("CMakeLists.txt", "set(X 14)", "set(X 17)", "a test")
    (tmp_path / "CMakeLists.txt").write_text("set(X 14)\nset(X 14)\n")
    with pytest.raises(RunError, match="found 2 times, expected 1"):
        edits.apply(tmp_path, [edit])
    assert (tmp_path / "CMakeLists.txt").read_text() == "set(X 14)\nset(X 14)\n"


def test_an_edit_whose_file_is_gone_fails(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"CMakeLists\.txt: cannot be read"):
        edits.apply(tmp_path, EDITS["mxnet"])


def test_tensorflow_alone_goes_without_its_xla_collectives() -> None:
    files = {name: [edit.file for edit in chosen] for name, chosen in EDITS.items()}
    xla = {name for name, chosen in EDITS.items() if any("xla_mpi_ops.cc" in edit.anchor for edit in chosen)}
    assert xla == {"tensorflow"}
    assert all("horovod/common/gloo/gloo_context.cc" in each for each in files.values())


def _key() -> str:
    return wheel.key(wheel.wheel_ingredients("pytorch", False, {"torch": "2.13.0+cpu", "numpy": "2.4.6"}))


def test_the_wheel_key_is_stable() -> None:
    assert _key() == _key()


def test_the_wheel_key_changes_with_each_thing_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {_key()}

    def is_new(what: str) -> None:
        key = _key()
        assert key not in seen, f"the key is the same with another {what}"
        seen.add(key)

    first, *others = EDITS["pytorch"]
    monkeypatch.setitem(EDITS, "pytorch", (dataclasses.replace(first, replacement="// another"), *others))
    is_new("edit")
    monkeypatch.setattr(pins, "HOROVOD_VERSION", "0.28.2")
    is_new("Horovod")
    monkeypatch.setattr(machine, "compiler", lambda: "g++ 99")
    is_new("compiler")
    monkeypatch.setattr(machine, "mpi", lambda: "mpirun (Open MPI) 4.1.4")
    is_new("MPI")
    monkeypatch.setattr(machine, "python_abi", lambda python: "3.99.0 cpython-399")
    is_new("Python")
    monkeypatch.setattr(machine, "architecture", lambda: "x86_64 none")
    is_new("processor")
    for variable in ("HOROVOD_BUILD_ARCH_FLAGS", "CXXFLAGS", "CC"):
        monkeypatch.setenv(variable, "-something")
        is_new(variable)
    assert wheel.key(wheel.wheel_ingredients("pytorch", False, {"torch": "2.13.0"})) not in seen
    for version in ("13.0", "13.1"):
        found = machine.Found(version, Path("/cuda"))
        monkeypatch.setattr(machine, "cuda", lambda found=found: machine.Cuda(found, found))
        on_gpu = wheel.key(wheel.wheel_ingredients("pytorch", True, {"torch": "2.13.0+cpu", "numpy": "2.4.6"}))
        assert on_gpu not in seen, "the key is the same with another CUDA"
        seen.add(on_gpu)


def test_the_wheel_key_stays_with_what_only_matters_to_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    assert _key() == before


def test_a_user_may_refuse_an_mpi_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mpi", lambda: "mpirun (Open MPI) 4.1.4")
    assert wheel.flags("mxnet", gpu=False)["HOROVOD_WITH_MPI"] == "1"
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")
    refused = wheel.flags("mxnet", gpu=False)
    assert refused["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in refused


def test_a_gpu_build_takes_nccl_for_all_and_never_beside_a_single_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc, nccl = machine.Found("13.0", Path("/cuda")), machine.Found("2.27", Path("/nccl"))
    monkeypatch.setattr(machine, "cuda", lambda: machine.Cuda(nvcc, nccl))
    monkeypatch.setenv("HOROVOD_GPU_ALLREDUCE", "NCCL")
    built_with = wheel.build_environment("pytorch", True, Path("/runtime/bin/python"))
    assert built_with["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert built_with["HOROVOD_NCCL_LINK"] == "SHARED"
    assert built_with["HOROVOD_NCCL_HOME"] == "/nccl"
    assert "HOROVOD_GPU_ALLREDUCE" not in built_with
    on_cpu = wheel.build_environment("pytorch", False, Path("/runtime/bin/python"))
    assert "HOROVOD_GPU_OPERATIONS" not in on_cpu


def test_a_build_names_its_framework_and_leaves_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITH_MXNET", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    built_with = wheel.build_environment("tensorflow", False, Path("/runtime/bin/python"))
    assert built_with["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert built_with["HOROVOD_WITHOUT_PYTORCH"] == built_with["HOROVOD_WITHOUT_MXNET"] == "1"
    assert "HOROVOD_WITH_MXNET" not in built_with
    assert "PYTHONPATH" not in built_with
    assert built_with["PATH"].startswith("/runtime/bin:")
