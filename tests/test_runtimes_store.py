"""Which runtimes are there: nothing half-made is taken for whole, two builds keep out of each other's way."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hvdkit
from hvdkit.commands import runtime_add
from hvdkit.commands import runtime_build as build
from hvdkit.commands.runtime_build import RuntimeBuildRequest
from hvdkit.errors import RequestError, RunError
from hvdkit.runtimes import cuda, doctor, environment, machine, store
from hvdkit.runtimes.process import output
from hvdkit.runtimes.store import Runtime


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for runtimes and cache; this machine's own are neither seen nor touched."""
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(tmp_path / "runtimes"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "runtimes"


def _runtime(name: str, key: str = "a key") -> Runtime:
    """A runtime's folder as a build leaves it, without a framework in it; not yet declared whole."""
    python = store.python_of(name)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    versions = {"torch": "2.13.0", "horovod": "0.28.1"}
    return Runtime(
        name=name,
        python=python,
        key=key,
        gpu=False,
        added=False,
        versions=versions,
        controllers=["gloo"],
        operations=["gloo"],
    )


def test_what_is_saved_is_found_for_every_framework_of_the_runtime() -> None:
    runtime = _runtime("tensorflow")
    store.save(runtime)
    assert store.find("keras") == store.find("tensorflow") == runtime
    assert store.installed() == [runtime]


def test_a_folder_without_its_record_is_not_a_runtime(folder: Path) -> None:
    _runtime("pytorch")
    assert store.load("pytorch") is None
    assert store.installed() == []
    with pytest.raises(RequestError, match=r"incomplete.*run `hvdkit runtime build pytorch`"):
        store.find("pytorch")


@pytest.mark.parametrize("record", ["", "{", "{}", '{"name": "pytorch"}', "[]"])
def test_a_damaged_record_is_not_a_runtime(folder: Path, record: str) -> None:
    store.save(_runtime("pytorch"))
    (folder / "pytorch" / "runtime.json").write_text(record)
    assert store.load("pytorch") is None
    with pytest.raises(RequestError, match=r"runtime\.json cannot be read"):
        store.find("pytorch")


def test_a_runtime_that_was_moved_is_not_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(_runtime("pytorch"))
    folder.rename(folder.with_name("moved"))
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(folder.with_name("moved")))
    with pytest.raises(RequestError, match="cannot be moved"):
        store.find("pytorch")


def test_a_runtime_whose_interpreter_is_gone_is_not_whole() -> None:
    runtime = _runtime("pytorch")
    store.save(runtime)
    runtime.python.unlink()
    runtime.python.symlink_to("/no/such/python")
    with pytest.raises(RequestError, match="is not there"):
        store.find("pytorch")


def test_an_interpreter_that_cannot_be_run_is_not_called_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_bytes(b"\x7fELF" + b"\1" * 14 + b"\xff\xff")
    python.chmod(0o600)
    assert store.fault_of(python) == "may not be run by this user: Permission denied"
    python.chmod(0o700)
    assert store.fault_of(python) == "is for another kind of processor than this machine's"
    assert store.fault_of(python / "below") == "cannot be reached: Not a directory"
    assert store.fault_of(Path(sys.executable)) is None
    runtime = _runtime("pytorch")
    store.save(runtime)
    runtime.python.unlink()  # a link to the interpreter of these tests
    runtime.python.touch(0o600)
    with pytest.raises(RequestError, match=r"which is broken .* may not be run by this user"):
        store.find("pytorch")


def test_find_names_the_known_frameworks_and_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"'pytroch'.*pytorch, tensorflow, keras, mxnet; did you mean 'pytorch'\?"):
        store.find("pytroch")


def test_an_unknown_runtime_is_refused_before_anything_is_made(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"unknown runtime 'mxnett'.*did you mean 'mxnet'"):
        build.run(RuntimeBuildRequest(names=["mxnett"], gpu=None))
    assert not folder.exists()


def test_a_whole_runtime_with_the_right_key_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    runtime = _runtime("pytorch", key=build.current_key("pytorch", gpu=False))
    store.save(runtime)
    build.run(RuntimeBuildRequest(names=["pytorch"], gpu=False))
    assert "ready: pytorch" in capsys.readouterr().out
    assert store.find("pytorch") == runtime


def test_all_that_a_build_lacks_is_told_at_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(RequestError) as caught:
        build.run(RuntimeBuildRequest(names=["pytorch"], gpu=False))
    assert "apt-get install g++" in str(caught.value)
    assert "apt-get install make" in str(caught.value)
    assert not folder.exists()


def test_gpu_without_cuda_and_nccl_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find", lambda python=None: cuda.Cuda(None, None))
    with pytest.raises(RequestError, match=r"--gpu[\s\S]*nvcc[\s\S]*nccl\.h"):
        build.run(RuntimeBuildRequest(names=["mxnet"], gpu=True))
    with pytest.raises(RequestError, match=r"--gpu[\s\S]*nvcc") as caught:
        build.run(RuntimeBuildRequest(names=["pytorch"], gpu=True))
    assert "nccl.h" not in str(caught.value), "torch brings NCCL"
    assert machine.decide_gpu("pytorch", None) is False


def test_cuda_and_nccl_are_taken_where_they_fit_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc, nccl = cuda.Installed("13.0", Path("/cuda")), cuda.Installed("2.27", Path("/nccl"))
    monkeypatch.setattr(cuda, "find", lambda python=None: cuda.Cuda(nvcc, nccl))
    assert machine.decide_gpu("pytorch", None) is True
    assert machine.decide_gpu("pytorch", False) is False
    assert machine.decide_gpu("mxnet", None) is False
    for name, wanted in (("mxnet", "CUDA 11, which mxnet 1.9.1"), ("tensorflow", "CUDA 12, which tensorflow 2.21.0")):
        with pytest.raises(
            RequestError, match=rf"{wanted} is for \(here 13\.0 in /cuda\): name its folder in CUDA_HOME"
        ):
            machine.decide_gpu(name, True)
        assert machine.decide_gpu(name, None) is False


def test_what_was_built_for_the_cpu_stays_where_cuda_comes_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = _runtime("pytorch", key=build.current_key("pytorch", gpu=False))
    store.save(runtime)
    found = cuda.Installed("13.0", Path("/cuda"))
    monkeypatch.setattr(cuda, "find", lambda python=None: cuda.Cuda(found, found))
    monkeypatch.setattr(machine, "require", lambda names, compiling: pytest.fail(f"a build of {list(names)} was begun"))
    build.run(RuntimeBuildRequest(names=["pytorch"], gpu=None))
    assert "ready: pytorch" in capsys.readouterr().out
    assert store.find("pytorch") == runtime


def test_two_processes_never_hold_the_same_runtime(tmp_path: Path) -> None:
    """The second waits, says so, and goes on as soon as the first is killed, even by SIGKILL."""
    script = (
        "from hvdkit.runtimes import store\n"
        "with store.lock('pytorch'):\n"
        "    print('held', flush=True)\n"
        "    import time; time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert store.locked("pytorch")
        assert not store.locked("mxnet")
        events: list[str] = []

        def kill() -> None:
            events.append("killed")
            first.kill()

        def told_to_wait() -> None:
            events.append("waits")
            threading.Timer(0.5, kill).start()

        with store.lock("pytorch", told_to_wait):
            events.append("held")
        assert events == ["waits", "killed", "held"]


def test_waiting_for_another_build_can_be_cancelled() -> None:
    cancelled = threading.Event()
    with store.lock("pytorch"):
        threading.Timer(0.3, cancelled.set).start()
        with pytest.raises(RunError, match="cancelled"), store.lock("pytorch", cancelled=cancelled):
            pytest.fail("the lock was given twice")


def test_an_installed_hvdkit_keeps_its_runtimes_in_the_users_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HVDKIT_RUNTIMES")
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "site-packages" / "hvdkit")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert store.root() == tmp_path / "data" / "hvdkit" / "runtimes"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert store.root() == Path.home() / ".local" / "share" / "hvdkit" / "runtimes"


def test_the_link_brings_hvdkit_and_nothing_that_lies_beside_it(tmp_path: Path) -> None:
    store.link_hvdkit(tmp_path / "link")
    store.link_hvdkit(tmp_path / "link")
    assert [entry.name for entry in (tmp_path / "link").iterdir()] == ["hvdkit"]
    command = [sys.executable, "-S", "-c", "import hvdkit, sys; print(hvdkit.__version__); import pydantic"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path / "link")}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"{hvdkit.__version__}\n"
    assert "No module named 'pydantic'" in done.stderr


def test_add_names_what_the_interpreter_lacks_and_the_commands_that_bring_it(tmp_path: Path) -> None:
    """A bare interpreter, an environment with nothing in it, has neither the framework nor Horovod."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "own"], check=True)
    python = tmp_path / "own" / "bin" / "python"
    with pytest.raises(RequestError) as caught:
        runtime_add.run(runtime_add.RuntimeAddRequest(name="pytorch", python=python))
    quoted = shlex.quote(str(python))
    pip = f"{shlex.quote(sys.executable)} -m pip --python {quoted}"  # it has none of its own
    assert f"{pip} install torch==2.13.0" in str(caught.value)
    assert f"hvdkit runtime add pytorch --python {quoted} --build" in str(caught.value)
    assert f"{pip} install safetensors" in str(caught.value)
    assert store.inspect("pytorch") == (None, None)


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 3\n"])
def test_add_refuses_what_is_no_interpreter(tmp_path: Path, content: str | None) -> None:
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(0o755)
    with pytest.raises(RequestError, match=re.escape(str(python))):
        runtime_add.run(runtime_add.RuntimeAddRequest(name="mxnet", python=python))


def test_the_doctor_names_a_broken_runtime_its_cause_and_the_remedy(
    folder: Path,
) -> None:
    _runtime("pytorch")  # half-made
    store.save(_runtime("mxnet"))  # declared whole, but with nothing in it
    report = doctor.examine()
    states = {found.name: found.state for found in report.findings}
    assert states == {"pytorch": "broken", "tensorflow": "not built", "mxnet": "broken"}
    assert report.exit_status == 1
    told = {fault.what: fault.remedy for fault in report.faults}
    assert any("incomplete" in what and remedy == "hvdkit runtime build pytorch" for what, remedy in told.items())
    remake = f"rm -r {shlex.quote(str(folder / 'mxnet'))} && hvdkit runtime build mxnet"
    assert any("has no mxnet" in what and remedy == remake for what, remedy in told.items())
    assert any("incomplete" in str(line) for line in report.lines())


def test_the_doctor_is_content_where_nothing_is_built_but_all_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.examine()
    assert {found.state for found in report.findings} == {"not built"}
    assert (report.exit_status, report.faults) == (0, [])
    monkeypatch.setattr(machine, "compiler", lambda: None)
    report = doctor.examine()
    assert report.exit_status == 1
    assert "apt-get install g++" in report.faults[0].remedy


def test_the_doctor_says_whether_processes_can_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory_fault() is None
    code = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4)); "
    limited = [sys.executable, "-c", code + "runpy.run_path(sys.argv[1], run_name='__main__')"]
    monkeypatch.setattr(machine, "output", lambda command: output([*limited, command[-1]]))
    assert machine.shared_memory_fault() == "memfd_create: Too many open files"
    row = doctor._machine()["shared memory"]
    assert row == "not between processes: memfd_create: Too many open files"
    monkeypatch.setenv("HOROVOD_SHARED_MEMORY", "0")
    assert machine.shared_memory_fault() == "HOROVOD_SHARED_MEMORY is 0"


def test_the_doctor_asks_for_no_compiler_where_a_runtime_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image, which holds one runtime and no compiler."""
    ready = doctor.Finding("mxnet", "ready")
    look = doctor._look_into
    monkeypatch.setattr(doctor, "_look_into", lambda name: ready if name == "mxnet" else look(name))
    monkeypatch.setattr(machine, "compiler", lambda: None)
    report = doctor.examine()
    assert (report.exit_status, report.faults) == (0, [])
    assert any("apt-get install g++" in note.remedy for note in report.notes)


def test_a_runtime_in_the_making_is_not_called_broken() -> None:
    _runtime("pytorch")
    with store.lock("pytorch"):
        states = {found.name: found.state for found in doctor.examine().findings}
    assert states["pytorch"] == "being built"


def test_the_probe_tells_versions_and_broken_imports(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("__version__ = '1.2'\nprint('noise')\n")
    (tmp_path / "bad.py").write_text("raise ImportError('libnothing.so.1: cannot open')\n")
    probe = Path(environment.__file__).with_name("probe.py")
    done = subprocess.run(
        [sys.executable, probe, "good", "horovod_missing", "bad"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["versions"]["good"] == "1.2"
    assert found["broken"] == {"bad": "ImportError: libnothing.so.1: cannot open"}
    assert set(found["missing"]) == {"horovod", "horovod_missing"}
