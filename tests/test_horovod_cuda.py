"""CUDA and NCCL are found in the folders of NVIDIA, Debian, conda and pip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdkit.runtimes import cuda

HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n"
SITE = "lib/python3.11/site-packages/nvidia"


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "HOROVOD_NCCL_HOME", "NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin-without-nvcc:/bin")
    monkeypatch.setattr(cuda, "_CUDA_HOMES", [tmp_path / "usr-local-cuda"])
    monkeypatch.setattr(cuda, "_NCCL_HOMES", [str(tmp_path / "usr")])
    monkeypatch.setattr(cuda.shutil, "which", lambda name: None)
    cuda.find.cache_clear()
    yield
    cuda.find.cache_clear()


def nvcc(home: Path, headers: str = "include", version: str = "13.0") -> Path:
    for folder in (home / "bin", home / headers):
        folder.mkdir(parents=True, exist_ok=True)
    (home / headers / "cuda_runtime.h").touch()
    program = home / "bin" / "nvcc"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    program.chmod(0o755)
    return home


def nccl(home: Path, library: str = "lib/libnccl.so", header: bool = True) -> Path:
    for file, text in ((home / library, ""), (home / "include" / "nccl.h", HEADER)):
        if header or file.name != "nccl.h":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return home


@pytest.mark.parametrize(
    ("where", "headers"),
    [("usr-local-cuda", "include"), ("env", "targets/x86_64-linux/include"), (f"env/{SITE}/cu13", "include")],
    ids=["NVIDIA", "conda", "pip"],
)
def test_the_compiler_is_found_in_each_layout(tmp_path: Path, where: str, headers: str) -> None:
    home = nvcc(tmp_path / where, headers)
    found = cuda.find(tmp_path / "env" / "bin" / "python").nvcc
    assert found == cuda.Found("13.0", home) and found.major == 13


@pytest.mark.parametrize(
    ("where", "library"),
    [
        ("usr", "lib/x86_64-linux-gnu/libnccl.so"),
        ("usr", "lib64/libnccl.so"),
        ("env", "lib/libnccl.so"),
        (f"env/{SITE}/nccl", "lib/libnccl.so.2"),
    ],
    ids=["Debian", "NVIDIA", "conda", "pip"],
)
def test_nccl_is_found_in_each_layout_and_can_be_linked(tmp_path: Path, where: str, library: str) -> None:
    home = nccl(tmp_path / where, library)
    found = cuda.find(tmp_path / "env" / "bin" / "python")
    assert found.nccl == cuda.Found("2.32.3", home) and found.library == home / library
    linked = found.link_nccl(tmp_path / "links")
    assert (linked / "include" / "nccl.h").is_file()
    assert next(linked.rglob("libnccl.so")).resolve() == (home / library).resolve()


def test_what_the_user_names_comes_first_then_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc(tmp_path / "usr-local-cuda", version="11.8")
    nccl(tmp_path / "usr")
    python = tmp_path / "env" / "bin" / "python"
    in_environment, by_pip = nvcc(tmp_path / "env", version="12.4"), nccl(tmp_path / "env" / SITE / "nccl")
    found = cuda.find(python)
    assert found.nvcc == cuda.Found("12.4", in_environment) and found.nccl and found.nccl.home == by_pip
    cuda.find.cache_clear()
    named = nvcc(tmp_path / "named", version="13.0")
    monkeypatch.setenv("CUDA_HOME", str(named))
    monkeypatch.setenv("NCCL_HOME", str(nccl(tmp_path / "mine")))
    found = cuda.find(python)
    assert found.nvcc == cuda.Found("13.0", named) and found.nccl and found.nccl.home == tmp_path / "mine"


def test_a_compiler_without_headers_is_none(tmp_path: Path) -> None:
    (nvcc(tmp_path / "usr-local-cuda") / "include" / "cuda_runtime.h").unlink()
    assert cuda.find().nvcc is None


def test_nccl_without_its_header_is_named(tmp_path: Path) -> None:
    nccl(tmp_path / "usr", "lib/x86_64-linux-gnu/libnccl.so.2", header=False)
    faults = {fault.what: fault.remedy for fault in cuda.find().missing()}
    what = f"nccl.h, the header of {tmp_path}/usr/lib/x86_64-linux-gnu/libnccl.so.2"
    assert "libnccl-dev" in faults[what] and "CUDA's compiler nvcc" in faults
    assert [fault.what for fault in cuda.find().missing(nccl=False)] == ["CUDA's compiler nvcc"]
