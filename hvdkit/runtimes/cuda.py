"""CUDA's compiler and NCCL, which a GPU build needs, in the folders of NVIDIA, Debian, conda and pip.

| from | CUDA | NCCL |
|---|---|---|
| NVIDIA's packages, tar files | /usr/local/cuda | /usr/local/nccl, /usr |
| Debian | /usr/bin/nvcc, headers in /usr/include | /usr/include, /usr/lib/x86_64-linux-gnu |
| conda | bin and targets/x86_64-linux of the environment | include and lib of the environment |
| pip | nvidia/cu13 (or nvidia/cuda_nvcc) in site-packages | nvidia/nccl, without libnccl.so |
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdkit.runtimes.process import output

_NCCL_HOMES = ("/usr", "/usr/local", "/usr/local/nccl", "/opt/nccl", "/usr/local/cuda")
_CUDA_HOMES = ("/usr/local/cuda", "/usr/lib/cuda", "/opt/cuda")


@dataclass(frozen=True)
class Missing:
    """Something that is missing, and the command or the step that installs it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Found:
    """A tool or library: its version, and its folder."""

    version: str
    home: Path

    @property
    def major(self) -> int:
        """The first part of the version."""
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class Cuda:
    """CUDA's compiler and NCCL; None if not found. `library` is NCCL's, `bare_nccl` one that lacks its headers."""

    nvcc: Found | None
    nccl: Found | None
    library: Path | None = None
    bare_nccl: Path | None = None

    def missing(self, nccl: bool = True) -> list[Missing]:
        """What is missing for a GPU build; with `nccl` False the framework's packages bring it."""
        faults = []
        if self.nvcc is None:
            remedy = "install the CUDA toolkit, with nvcc on PATH or its folder in CUDA_HOME"
            faults.append(Missing("CUDA's compiler nvcc", remedy))
        if nccl and self.nccl is None:
            remedy = "install libnccl-dev or name its folder in HOROVOD_NCCL_HOME"
            what = f"nccl.h, the header of {self.bare_nccl}" if self.bare_nccl else "NCCL's nccl.h and libnccl.so"
            faults.append(Missing(what, remedy))
        return faults

    def link_nccl(self, folder: Path) -> Path:
        """A folder with include/nccl.h and lib/libnccl.so: NCCL's own, or else one of links, made in `folder`.

        pip's NCCL has only libnccl.so.2, which the linker does not look for.
        """
        assert self.nccl is not None and self.library is not None
        if self.library.name == "libnccl.so":
            return self.nccl.home
        (folder / "lib").mkdir(parents=True)
        (folder / "include").symlink_to(self.nccl.home / "include")
        (folder / "lib" / "libnccl.so").symlink_to(self.library)
        return folder


@functools.cache
def find(python: Path | None = None) -> Cuda:
    """CUDA and NCCL as a build would find them: those that the user names, those in the environment of `python`, then
    the machine's."""
    nccl, library, bare = _nccl(python)
    return Cuda(_nvcc(python), nccl, library, bare)


def _named(*variables: str) -> Iterator[Path]:
    return (Path(value) for name in variables if (value := os.environ.get(name)))


def _environment(python: Path | None, *in_site_packages: str) -> Iterator[Path]:
    """The folders of the environment of `python` in which conda and pip put what NVIDIA makes."""
    if python is not None:
        prefix = python.parent.parent
        yield prefix
        for part in in_site_packages:
            yield from sorted(prefix.glob(f"lib/python3*/site-packages/nvidia/{part}"))


def _nvcc(python: Path | None) -> Found | None:
    homes = [*_named("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"), *_environment(python, "cu1*", "cuda_nvcc")]
    candidates = [home / "bin" / "nvcc" for home in homes]
    candidates += [Path(found)] if (found := shutil.which("nvcc")) else []
    candidates += [Path(home) / "bin" / "nvcc" for home in _CUDA_HOMES]
    for candidate in candidates:
        if not candidate.is_file():
            continue
        match = re.search(r"release ([\d.]+)", output([candidate, "--version"]) or "")
        # nvcc can be a wrapper for one in another folder; the toolkit is where the headers are.
        home = candidate.parent.parent
        headers = (*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h"))
        if match and headers:
            return Found(match[1], home)
    return None


def _nccl(python: Path | None) -> tuple[Found | None, Path | None, Path | None]:
    """NCCL, its library, and the first library that was found without its header."""
    homes = [*_named("HOROVOD_NCCL_HOME", "NCCL_HOME"), *_environment(python, "nccl"), *map(Path, _NCCL_HOMES)]
    bare = None
    for home in homes:
        header = home / "include" / "nccl.h"
        # libnccl.so before libnccl.so.2, which pip's NCCL has alone.
        places = (
            "lib*/libnccl.so",
            "lib*/*-linux-gnu/libnccl.so",
            "lib*/libnccl.so.2",
            "lib*/*-linux-gnu/libnccl.so.2",
        )
        library = next((found for place in places for found in sorted(home.glob(place))), None)
        if library and header.is_file():
            numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace"))
            return Found(".".join(numbers) or "unknown", home), library, None
        bare = bare or library
    return None, None, bare
