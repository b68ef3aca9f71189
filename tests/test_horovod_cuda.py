"""CUDA, NCCL and cuDNN are found in the folders of NVIDIA, Debian, conda and pip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdkit.runtimes import cuda

pytestmark = pytest.mark.check

HEADERS = {
    "nccl": ("nccl.h", "#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n"),
    "cudnn": ("cudnn_version.h", "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 10\n#define CUDNN_PATCHLEVEL 1\n"),
}
VERSIONS = {"nccl": "2.32.3", "cudnn": "9.10.1"}
SITE = "lib/python3.11/site-packages/nvidia"


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "HOROVOD_NCCL_HOME", "NCCL_HOME", "CUDNN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/usr/bin:/bin")
    monkeypatch.setattr(cuda, "_CUDA_HOMES", [tmp_path / "usr-local-cuda"])
    monkeypatch.setattr(cuda, "_LIBRARY_HOMES", [str(tmp_path / "usr"), str(tmp_path / "usr-local-cuda")])
    cuda.find.cache_clear()
    yield
    cuda.find.cache_clear()


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter whose path has the site-packages of its environment."""
    return program(tmp_path / "env" / "bin" / "python", f"echo {tmp_path}/env/{SITE.removesuffix('/nvidia')}")


def nvcc(home: Path, headers: str = "include", version: str = "13.0") -> Path:
    (home / headers).mkdir(parents=True, exist_ok=True)
    (home / headers / "cuda_runtime.h").touch()
    said = f"echo 'Cuda compilation tools, release {version}, V{version}.88'"
    program(home / "bin" / "nvcc", f"[ $1 = --version ] && {said} || echo '#$ TOP={home}/bin/..' >&2")
    return home


def library(home: Path, name: str = "nccl", at: str = "lib/libnccl.so", include: str | None = "include") -> Path:
    header, text = HEADERS[name]
    places = [(home / at, ""), *([(home / include / header, text)] if include else [])]
    for file, content in places:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return home


@pytest.mark.parametrize(
    ("where", "headers"),
    [
        ("usr-local-cuda", "include"),
        ("usr", "include"),
        ("env", "targets/x86_64-linux/include"),
        (f"env/{SITE}/cu13", "include"),
    ],
    ids=["NVIDIA", "Debian", "conda", "pip"],
)
def test_the_compiler_is_found_in_each_layout(tmp_path: Path, python: Path, where: str, headers: str) -> None:
    home = nvcc(tmp_path / where, headers)
    found = cuda.find(python).nvcc
    assert found == cuda.Installed("13.0", home) and found.major == 13


def test_a_wrapper_leads_to_the_toolkit_in_another_folder(tmp_path: Path) -> None:
    elsewhere = nvcc(tmp_path / "elsewhere" / "cuda-13.0")
    program(tmp_path / "usr" / "bin" / "nvcc", f'exec {elsewhere}/bin/nvcc "$@"')
    assert cuda.find().nvcc == cuda.Installed("13.0", elsewhere)


@pytest.mark.parametrize("name", ["nccl", "cudnn"])
@pytest.mark.parametrize(
    ("where", "at", "include"),
    [
        ("usr-local-cuda", "lib64/lib{}.so", "include"),
        ("usr", "lib/x86_64-linux-gnu/lib{}.so", "include/x86_64-linux-gnu"),
        ("usr", "lib/x86_64-linux-gnu/lib{}.so", "include"),
        ("env", "lib/lib{}.so", "include"),
        ("env/" + SITE + "/{}", "lib/lib{}.so.2", "include"),
    ],
    ids=["NVIDIA", "NVIDIA's packages", "Debian", "conda", "pip"],
)
def test_libraries_are_found_in_each_layout(
    tmp_path: Path, python: Path, name: str, where: str, at: str, include: str
) -> None:
    home = library(tmp_path / where.format(name), name, at.format(name), include)
    found = cuda.find(python)
    assert getattr(found, name) == cuda.Installed(VERSIONS[name], home)
    assert {found.nccl, found.cudnn} == {getattr(found, name), None}


def test_what_the_user_names_comes_first_then_the_environment(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc(tmp_path / "usr-local-cuda", version="11.8")
    library(tmp_path / "usr")
    in_environment = nvcc(tmp_path / "env", version="12.4")
    by_pip = library(tmp_path / "env" / SITE / "nccl", at="lib/libnccl.so.2")
    found = cuda.find(python)
    assert found.nvcc == cuda.Installed("12.4", in_environment) and found.nccl and found.nccl.home == by_pip
    cuda.find.cache_clear()
    named = nvcc(tmp_path / "named", version="13.0")
    monkeypatch.setenv("CUDA_HOME", str(named))
    monkeypatch.setenv("NCCL_HOME", str(library(tmp_path / "mine")))
    found = cuda.find(python)
    assert found.nvcc == cuda.Installed("13.0", named) and found.nccl and found.nccl.home == tmp_path / "mine"


def test_a_compiler_without_headers_is_none(tmp_path: Path) -> None:
    (nvcc(tmp_path / "usr-local-cuda") / "include" / "cuda_runtime.h").unlink()
    assert cuda.find().nvcc is None


def test_nccl_without_its_header_is_named(tmp_path: Path) -> None:
    library(tmp_path / "usr", at="lib/x86_64-linux-gnu/libnccl.so.2", include=None)
    faults = {fault.what: fault.remedy for fault in cuda.find().missing()}
    what = f"nccl.h, the header of {tmp_path}/usr/lib/x86_64-linux-gnu/libnccl.so.2"
    assert "libnccl-dev" in faults[what] and "CUDA's compiler nvcc" in faults
    assert [fault.what for fault in cuda.find().missing(nccl=False)] == ["CUDA's compiler nvcc"]


def test_a_variable_that_names_the_wrong_folder_is_a_fault_not_passed_over(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc(tmp_path / "usr-local-cuda")
    library(tmp_path / "usr")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "empty"))
    found = cuda.find(python)
    assert found.nvcc and found.nccl
    assert [fault.what for fault in found.missing()] == [
        f"bin/nvcc and CUDA's headers in {tmp_path}/empty, which CUDA_HOME names",
        f"NCCL's nccl.h and libnccl.so in {tmp_path}/empty, which HOROVOD_NCCL_HOME names",
    ]
    assert [fault.remedy for fault in found.missing(nccl=False)] == ["correct CUDA_HOME, or unset it"]
    cuda.find.cache_clear()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "usr-local-cuda"))
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "usr"))
    assert cuda.find(python).missing() == []
