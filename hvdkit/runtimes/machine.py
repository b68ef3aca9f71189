"""What this machine has that a Horovod build depends on: interpreters, compiler, MPI, CUDA, NCCL, processor."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import RequestError
from hvdkit.runtimes.pins import RUNTIMES

# What Horovod's CMake lists switch on where the processor has it, by the name in /proc/cpuinfo.
_ARCH_FLAGS = ("avx", "f16c", "fma")
_NCCL_PLACES = ("/usr", "/usr/local", "/usr/local/nccl", "/opt/nccl")


@dataclass(frozen=True)
class Missing:
    """Something that is not there: what it is and the command or the step that brings it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Found:
    """A tool or library that is there: its version, and the folder that holds it."""

    version: str
    home: Path


@dataclass(frozen=True)
class Cuda:
    """CUDA's compiler and NCCL, both of which a GPU build needs; None where not found."""

    nvcc: Found | None
    nccl: Found | None

    def missing(self) -> list[Missing]:
        """What a GPU build lacks."""
        faults = []
        if self.nvcc is None:
            faults.append(
                Missing(
                    "CUDA's compiler nvcc",
                    "install the CUDA toolkit, with nvcc on PATH or its folder in CUDA_HOME",
                )
            )
        if self.nccl is None:
            faults.append(
                Missing("NCCL's nccl.h and libnccl.so", "install libnccl-dev or name its folder in HOROVOD_NCCL_HOME")
            )
        return faults


def output(command: Sequence[str | Path]) -> str | None:
    """What `command` prints, or None where it is missing, fails or takes longer than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or done.stderr.strip()


def compiler() -> str | None:
    """First line of the C++ compiler's `--version`, or None; `CXX` names another than c++, as for CMake."""
    words = (os.environ.get("CXX") or "c++").split()
    text = output([*words, "--version"])
    return text.splitlines()[0] if text else None


def make() -> str | None:
    """First line of `make --version`, or None."""
    text = output(["make", "--version"])
    return text.splitlines()[0] if text else None


@functools.cache
def mpi() -> str | None:
    """The MPI that Horovod would be built with, or None; what counts is its compiler mpicxx."""
    if shutil.which("mpicxx") is None:
        return None
    text = output(["mpirun", "--version"]) or output(["mpicxx", "--version"])
    return text.splitlines()[0] if text else "unknown"


@functools.cache
def cuda() -> Cuda:
    """CUDA and NCCL as a build would find them."""
    return Cuda(nvcc=_nvcc(), nccl=_nccl())


def _nvcc() -> Found | None:
    homes = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    candidates = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    candidates += [found] if (found := shutil.which("nvcc")) else []
    candidates.append("/usr/local/cuda/bin/nvcc")
    for candidate in candidates:
        home = Path(candidate).parent.parent
        text = output([candidate, "--version"])
        match = re.search(r"release ([\d.]+)", text or "")
        # A lone nvcc may be a wrapper for one that lies elsewhere; headers beside it show where the toolkit is.
        if match and (home / "include" / "cuda_runtime.h").is_file():
            return Found(match[1], home)
    return None


def _nccl() -> Found | None:
    named = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME")]
    for home in [Path(home) for home in (*named, *_NCCL_PLACES) if home]:
        header = home / "include" / "nccl.h"
        libraries = (*home.glob("lib*/libnccl.so"), *home.glob("lib*/*-linux-gnu/libnccl.so"))
        if header.is_file() and libraries:
            numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace"))
            return Found(".".join(numbers) or "unknown", home)
    return None


def gpus() -> list[str]:
    """The NVIDIA GPUs that the driver shows, one line each."""
    text = output(["nvidia-smi", "-L"]) if shutil.which("nvidia-smi") else None
    return text.splitlines() if text else []


def architecture() -> str:
    """The machine's architecture and those of its abilities that Horovod's build switches on."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        flags = None
    present = flags[1].split() if flags else []
    return " ".join([platform.machine(), *(flag for flag in _ARCH_FLAGS if flag in present)])


def python_for(name: str) -> Path | None:
    """The interpreter to build the runtime `name` with: this one where it fits the pins, else one on PATH."""
    versions = RUNTIMES[name].pythons
    if sys.version_info[:2] in versions:
        # Not sys.executable: in an environment, its links would tie the runtime to that environment.
        return Path(getattr(sys, "_base_executable", sys.executable))
    for major, minor in versions:
        if found := shutil.which(f"python{major}.{minor}"):
            return Path(found)
    return None


def python_abi(python: Path) -> str:
    """An interpreter's version without its patch level, and its binary interface: `3.11 cpython-311-x86_64-linux-gnu`.

    A later patch level runs the same environments and extensions.
    """
    if _is_this(python):
        return f"{sysconfig.get_python_version()} {sysconfig.get_config_var('SOABI')}"
    probe = "import sysconfig; print(sysconfig.get_python_version(), sysconfig.get_config_var('SOABI'))"
    return output([python, "-c", probe]) or str(python)


def _is_this(python: Path) -> bool:
    return python == Path(getattr(sys, "_base_executable", sys.executable))


def _lacks(python: Path) -> tuple[bool, bool]:
    """Whether the interpreter lacks its headers, and whether it lacks venv with ensurepip."""
    if _is_this(python):
        header = Path(sysconfig.get_path("include")) / "Python.h"
        return not header.is_file(), importlib.util.find_spec("ensurepip") is None
    probe = (
        "import importlib.util as u, os, sysconfig as s; "
        "print(int(not os.path.isfile(os.path.join(s.get_path('include'), 'Python.h'))), "
        "int(u.find_spec('ensurepip') is None))"
    )
    answer = (output([python, "-c", probe]) or "1 1").split()
    return answer[0] == "1", answer[1] == "1"


def missing(names: Iterable[str]) -> list[Missing]:
    """All that building the runtimes `names` needs and this machine lacks."""
    faults: dict[str, Missing] = {}

    def lack(what: str, remedy: str) -> None:
        faults.setdefault(what, Missing(what, remedy))

    if compiler() is None:
        lack("a C++ compiler (g++)", "sudo apt-get install g++")
    if make() is None:
        lack("make", "sudo apt-get install make")
    for name in names:
        python = python_for(name)
        if python is None:
            wanted = " or ".join(f"{major}.{minor}" for major, minor in RUNTIMES[name].pythons)
            lack(
                f"Python {wanted} for the runtime '{name}' (this is {platform.python_version()})",
                "put such a pythonX.Y on PATH",
            )
            continue
        no_headers, no_venv = _lacks(python)
        debian = f"python{python_abi(python).split()[0]}"
        if no_headers:
            lack(f"the headers of {python} (Python.h)", f"sudo apt-get install {debian}-dev")
        if no_venv:
            lack(f"the module venv of {python}", f"sudo apt-get install {debian}-venv")
    return list(faults.values())


def require(names: Iterable[str]) -> None:
    """Raise RequestError, with all that is missing at once, where this machine cannot build the runtimes `names`."""
    refuse("building a runtime needs what is missing here", missing(names))


def refuse(why: str, faults: list[Missing]) -> None:
    """Raise RequestError with one line a fault, if there is any."""
    if faults:
        raise RequestError("\n".join([f"{why}:", *(f"  {fault.what}: {fault.remedy}" for fault in faults)]))


def decide_gpu(name: str, gpu: bool | None) -> bool:
    """Whether to build the runtime `name` for GPUs: as asked for, else where CUDA and NCCL are there and fit it.

    Raises RequestError where GPUs are asked for and CUDA or NCCL is missing or does not fit.
    """
    if gpu is False:
        return False
    found, newest = cuda(), RUNTIMES[name].newest_cuda
    faults = found.missing()
    if found.nvcc and newest and int(found.nvcc.version.split(".")[0]) > newest:
        what = f"a CUDA that the last release of {name} knows: {newest} at most (here {found.nvcc.version})"
        faults.append(Missing(what, f"build it for the CPU, `hvdkit runtime build {name} --cpu`, and the others apart"))
    if gpu:
        refuse("--gpu needs what is missing here", faults)
    return not faults
