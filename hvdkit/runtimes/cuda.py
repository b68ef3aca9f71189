"""CUDA's compiler, NCCL and cuDNN in the folders of NVIDIA, Debian, conda and pip. A GPU build needs the first two.

| from | CUDA | NCCL and cuDNN |
|---|---|---|
| NVIDIA's packages, tar files | /usr/local/cuda | /usr/local/nccl, /usr/local/cuda, /usr |
| Debian | /usr/bin/nvcc, headers in /usr/include | /usr/include, /usr/lib/x86_64-linux-gnu |
| conda | bin and targets/x86_64-linux of the environment | include and lib of the environment |
| pip | nvidia/cu13 (or nvidia/cuda_nvcc) in site-packages | nvidia/nccl, nvidia/cudnn, without libnccl.so |
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdkit.runtimes.process import output

_LIBRARY_HOMES = ("/usr", "/usr/local", "/usr/local/nccl", "/opt/nccl", "/usr/local/cuda", "/usr/local/cudnn")
_CUDA_HOMES = ("/usr/local/cuda", "/usr/lib/cuda", "/opt/cuda")
_CUDA_VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
_NCCL_VARIABLES = ("HOROVOD_NCCL_HOME", "NCCL_HOME")
_CONTENTS = dict.fromkeys(_CUDA_VARIABLES, "bin/nvcc and CUDA's headers") | dict.fromkeys(
    _NCCL_VARIABLES, "NCCL's nccl.h and libnccl.so"
)
_PRINT_PATH = "import sys; print(*sys.path, sep='\\n')"


@dataclass(frozen=True)
class Missing:
    """Something that is missing, and the command or the step that installs it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Installed:
    """A tool or library: its version, and its folder."""

    version: str
    home: Path

    @property
    def major(self) -> int:
        """The first part of the version."""
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class Cuda:
    """CUDA's compiler, NCCL and cuDNN; None if not found. `bare_nccl` is an NCCL library that lacks its header.

    `misnamed` are variables such as CUDA_HOME that name a folder which does not have what they stand for.
    """

    nvcc: Installed | None
    nccl: Installed | None
    bare_nccl: Path | None = None
    cudnn: Installed | None = None
    misnamed: tuple[str, ...] = ()

    def missing(self, nccl: bool = True) -> list[Missing]:
        """What is missing for a GPU build; with `nccl` False the framework's packages bring it."""
        faults = [
            Missing(f"{_CONTENTS[name]} in {os.environ.get(name)}, which {name} names", f"correct {name}, or unset it")
            for name in self.misnamed
            if nccl or name in _CUDA_VARIABLES
        ]
        if self.nvcc is None:
            remedy = "install the CUDA toolkit, with nvcc on PATH or its folder in CUDA_HOME"
            faults.append(Missing("CUDA's compiler nvcc", remedy))
        if nccl and self.nccl is None:
            remedy = "install libnccl-dev or name its folder in HOROVOD_NCCL_HOME"
            what = f"nccl.h, the header of {self.bare_nccl}" if self.bare_nccl else "NCCL's nccl.h and libnccl.so"
            faults.append(Missing(what, remedy))
        return faults


@functools.cache
def find(python: Path | None = None) -> Cuda:
    """CUDA, NCCL and cuDNN as a build would find them: those that the user names, those in the environment of `python`,
    then the machine's."""
    folders = packages(python)
    nvcc = _nvcc(python, folders)
    nccl, bare = _library("nccl", "nccl.h", _NCCL_VARIABLES, python, folders)
    cudnn, _ = _library("cudnn", "cudnn_version.h", ("CUDNN_HOME", "CUDNN_PATH"), python, folders)
    misnamed = [name for name, home in _named(*_CUDA_VARIABLES)[:1] if not _compiler(home / "bin" / "nvcc")]
    misnamed += [name for name, home in _named(*_NCCL_VARIABLES)[:1] if not nccl or nccl.home != home]
    return Cuda(nvcc, nccl, bare, cudnn, tuple(misnamed))


def _named(*variables: str) -> list[tuple[str, Path]]:
    """Those variables that are set, with the folder that each names; the first one decides."""
    return [(name, Path(value)) for name in variables if (value := os.environ.get(name))]


def _prefix(python: Path | None) -> list[Path]:
    """The folder of the environment of `python`, if it has one: conda puts CUDA there."""
    prefix = python.parent.parent if python else Path("/usr")
    return [] if prefix in (Path("/usr"), Path("/usr/local")) else [prefix]


def packages(python: Path | None) -> list[Path]:
    """The folders named nvidia in which pip puts NVIDIA's packages, for the interpreter `python`."""
    if python is None:
        return []
    path = output([python, "-E", "-c", _PRINT_PATH]) or ""
    return [folder for entry in path.splitlines() if entry and (folder := Path(entry) / "nvidia").is_dir()]


def _nvcc(python: Path | None, packages: Iterable[Path]) -> Installed | None:
    homes = [*(home for _, home in _named(*_CUDA_VARIABLES)), *_prefix(python)]
    homes += [home for folder in packages for name in ("cu1*", "cuda_nvcc") for home in sorted(folder.glob(name))]
    candidates = [home / "bin" / "nvcc" for home in homes]
    candidates += [Path(program)] if (program := shutil.which("nvcc")) else []
    candidates += [Path(home) / "bin" / "nvcc" for home in _CUDA_HOMES]
    return next(filter(None, map(_compiler, candidates)), None)


def _compiler(candidate: Path) -> Installed | None:
    """The toolkit of an nvcc."""
    if not candidate.is_file():
        return None
    match = re.search(r"release ([\d.]+)", output([candidate, "--version"]) or "")
    # nvcc can be a link to, or a script for, one in another folder; the toolkit is where the headers are.
    top = re.search(r"^#\$ TOP=(.+)$", output([candidate, "--dryrun", "-x", "cu", "-E", os.devnull]) or "", re.M)
    homes = [candidate.parent.parent, *([Path(os.path.normpath(top[1].strip()))] if top else [])]
    for home in homes:
        if match and _first(home, ("include", "targets/*/include"), ("cuda_runtime.h",)):
            return Installed(match[1], home)
    return None


def _library(
    name: str, header: str, variables: tuple[str, ...], python: Path | None, packages: Iterable[Path]
) -> tuple[Installed | None, Path | None]:
    """The library with its header, and the first library that was found without it."""
    homes = [*(home for _, home in _named(*variables)), *_prefix(python)]
    homes += [*(folder / name for folder in packages), *map(Path, _LIBRARY_HOMES)]
    bare = None
    for home in homes:
        # pip's has only libnccl.so.2, and no libnccl.so.
        library = _first(home, ("lib*", "lib*/*-linux-gnu", "targets/*/lib"), (f"lib{name}.so", f"lib{name}.so.*"))
        text = _first(home, ("include", "include/*-linux-gnu", "targets/*/include"), (header,))
        if library and text:
            define = rf"#define {name.upper()}_(?:MAJOR|MINOR|PATCH|PATCHLEVEL)\s+(\d+)"
            numbers = re.findall(define, text.read_text(errors="replace"))
            return Installed(".".join(numbers) or "unknown", home), None
        bare = bare or library
    return None, bare


def _first(home: Path, folders: Iterable[str], names: Iterable[str]) -> Path | None:
    patterns = (f"{folder}/{name}" for name in names for folder in folders)
    return next((path for pattern in patterns for path in sorted(home.glob(pattern))), None)
