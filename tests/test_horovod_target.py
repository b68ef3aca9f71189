"""What Horovod can be built for in an environment: found without changing it, and refused with a remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdkit.errors import RequestError
from hvdkit.runtimes import cuda, machine, target

pytestmark = pytest.mark.check

GOOD = {
    "python": "3.12.1",
    "implementation": "CPython",
    "machine": "x86_64",
    "headers": True,
    "pip": True,
    "versions": {"numpy": "2.4.6", "torch": "2.13.0"},
    "cuda": {"torch": "13.0"},
}
CUDA = cuda.Cuda(cuda.Installed("13.0", Path("/cuda")), cuda.Installed("2.32", Path("/nccl")))


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An interpreter that answers as if it was another; its answer can be changed."""
    monkeypatch.setattr(machine, "missing", lambda names: [])
    monkeypatch.setattr(cuda, "find", lambda python=None: cuda.Cuda(None, None))
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    python = tmp_path / "python"

    def answer(**changes: Any) -> Path:
        said = GOOD | changes
        said["cuda"] = {module: cuda for module, cuda in said["cuda"].items() if module in said["versions"]}
        python.write_text(f"#!/bin/sh\necho noise\necho '{json.dumps(said)}'\n")
        python.chmod(0o755)
        return python

    return answer


def test_all_frameworks_of_an_environment_are_found(answers: Any) -> None:
    versions = {"numpy": "2.4.6", "torch": "2.13.0", "tensorflow": "2.21.0"}
    found = target.find(answers(versions=versions), None)
    assert found.versions == versions and not found.gpu
    assert found.modules == ["torch", "tensorflow"] and found.describe() == "torch 2.13.0, tensorflow 2.21.0"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"python": "3.8.18"}, r"CPython 3\.8\.18, expected CPython 3\.9 or later: name another"),
        ({"implementation": "PyPy"}, r"PyPy 3\.12\.1, expected CPython"),
        ({"machine": "aarch64"}, r"it is for aarch64, this machine is x86_64: build on a machine of that kind"),
        ({"machine": "a 32-bit build"}, r"it is for a 32-bit build"),
        ({"headers": False}, r"the headers of .*Python\.h\): sudo apt-get install python3\.12-dev"),
        ({"versions": {"torch": "2.13.0"}}, r"numpy is not installed: .*python -m pip install numpy"),
        ({"versions": {"torch": "2"}, "pip": False}, r"numpy .*python -m pip --python .*python install numpy"),
        ({"versions": {"numpy": "2"}}, r"none of torch, tensorflow, mxnet is installed: install the framework there"),
        ({"versions": {"numpy": "2", "torch": "2.0.1"}}, r"torch 2\.0\.1, expected 2\.1 or later"),
        ({"versions": {"numpy": "2", "tensorflow": "2.14.1"}}, r"tensorflow 2\.14\.1, expected 2\.15 or later"),
        ({"versions": {"numpy": "2", "mxnet": "unknown"}}, r"mxnet unknown, expected 1\.9\.1 or later"),
    ],
)
def test_what_cannot_be_built_for_is_refused_with_a_remedy(answers: Any, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(RequestError, match=rf"(?s)^Horovod cannot be built for .*python:\n.*{fault}"):
        target.find(answers(**changes), None)


def test_all_faults_are_reported_at_once(answers: Any) -> None:
    with pytest.raises(RequestError) as caught:
        target.find(answers(python="3.8.18", headers=False, versions={"numpy": "2"}), None)
    assert len(str(caught.value).splitlines()) == 4


def test_gpu_is_chosen_where_cuda_nccl_and_torch_allow_it(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"(?s)CUDA's compiler nvcc: .*NCCL's nccl\.h"):
        target.find(answers(), True)
    monkeypatch.setattr(cuda, "find", lambda python=None: CUDA)
    assert target.find(answers(), None).gpu and target.find(answers(), True).gpu
    assert not target.find(answers(), False).gpu
    cpu = answers(cuda={"torch": None}, versions={"numpy": "2.4.6", "torch": "2.13.0+cpu"})
    assert not target.find(cpu, None).gpu
    with pytest.raises(RequestError, match=r"torch 2\.13\.0\+cpu is a CPU build: install a CUDA build of torch"):
        target.find(cpu, True)


def test_two_cudas_and_a_cpu_build_of_any_framework_are_refused(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find", lambda python=None: CUDA)
    versions = {"numpy": "2.4.6", "torch": "2.13.0", "tensorflow": "2.21.0", "mxnet": "1.9.1"}
    both = answers(versions=versions, cuda={"torch": "13.0", "tensorflow": "12.5.1", "mxnet": None})
    assert not target.find(both, None).gpu
    with pytest.raises(RequestError) as caught:
        target.find(both, True)
    _, *faults = str(caught.value).splitlines()
    assert faults == [
        "  tensorflow 2.21.0 is for CUDA 12.5.1, the compiler in /cuda is of 13.0: "
        "name the folder of the other CUDA in CUDA_HOME, or use --cpu",
        "  mxnet 1.9.1 is a CPU build: install a CUDA build of mxnet there, or use --cpu",
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "it is not there"),
        ("#!/bin/sh\nexit 3\n", "got no answer from it: exit status 3"),
        ("#!/no/such/program\n", r"cannot be run \(No such file or directory\)"),
        ("#!/bin/sh\necho hello\n", "expected CPython 3.9 or later, got no answer"),
        ("#!/bin/sh\necho [1]\n", "got no answer from it: exit status 0; name a Python interpreter"),
        ("#!/bin/sh\necho {}\n", "got no answer from it: exit status 0; name a Python interpreter"),
        ("#!/bin/sh\nkill -9 $$\n", "got no answer from it: exit status -9"),
        ("#!/bin/sh\n[ $1 = -c ] && echo 3.6.15 || exit 1\n", "expected CPython 3.9 or later, it is 3.6.15; name an"),
        ("\x7fELF\x02\x01\x01" + 9 * "\0" + "\x02\0\x40" + 60 * "\0", "it is for another kind of processor"),
    ],
)
def test_what_is_no_interpreter_is_refused(tmp_path: Path, content: str | None, fault: str) -> None:
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(0o755)
    with pytest.raises(RequestError, match=fault):
        target.find(python, None)


def test_the_probe_finds_modules_without_importing_them(tmp_path: Path) -> None:
    """Frameworks that must not be imported: versions come from pip's records, CUDA from files that import nothing."""
    records = {"torch": ("torch", "2.6.0"), "tensorflow": ("tensorflow", "2.21.0"), "mxnet": ("mxnet-cu117", "1.9.1")}
    for module, (name, version) in records.items():
        record = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        for folder in (tmp_path / module, record):
            folder.mkdir()
        (tmp_path / module / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "torch" / "version.py").write_text("cuda: str = '12.4'\n")
    info = tmp_path / "tensorflow" / "python" / "platform" / "build_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("build_info = dict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])\n")
    assert probed(tmp_path) == {"torch": "12.4", "tensorflow": "12.5.1", "mxnet": "11.7"}
    (tmp_path / "torch" / "version.py").write_text("cuda: str = None\n")
    info.write_text("build_info = dict([('is_cuda_build', False)])\n")
    (tmp_path / "mxnet_cu117-1.9.1.dist-info").rename(tmp_path / "mxnet-1.9.1.dist-info")
    (tmp_path / "mxnet-1.9.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mxnet\nVersion: 1.9.1\n")
    assert probed(tmp_path) == {"torch": None, "tensorflow": None, "mxnet": None}


def probed(folder: Path) -> Any:
    """What the probe says of CUDA where `folder` is on the path."""
    asked = ["torch=torch", "tensorflow=tensorflow-cpu,tensorflow", "mxnet=mxnet,mxnet-cu117"]
    command = [sys.executable, str(target._PROBE), *asked]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    versions = {module: version for module, version in answer["versions"].items() if module != "numpy"}
    assert versions == {"torch": "2.6.0", "tensorflow": "2.21.0", "mxnet": "1.9.1"}
    return answer["cuda"]
