"""What this machine has for a Horovod build: interpreters, compiler, MPI, CUDA, NCCL, processor."""

from __future__ import annotations

import functools
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

# What Horovod's CMake lists enable if the processor has it, by the names in /proc/cpuinfo.
_ARCH_FLAGS = ("avx", "f16c", "fma")
# Prints `dev` without the headers of the interpreter, `venv` without its venv with ensurepip.
_PRINT_LACKING = """
import importlib.util, os, sysconfig
if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("dev")
if importlib.util.find_spec("ensurepip") is None:
    print("venv")
"""
_NCCL_PLACES = ("/usr", "/usr/local", "/usr/local/nccl", "/opt/nccl")


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


@dataclass(frozen=True)
class Cuda:
    """CUDA's compiler and NCCL, both of which a GPU build needs; None if not found."""

    nvcc: Found | None
    nccl: Found | None

    def missing(self) -> list[Missing]:
        """What is missing for a GPU build."""
        faults = []
        if self.nvcc is None:
            remedy = "install the CUDA toolkit, with nvcc on PATH or its folder in CUDA_HOME"
            faults.append(Missing("CUDA's compiler nvcc", remedy))
        if self.nccl is None:
            remedy = "install libnccl-dev or name its folder in HOROVOD_NCCL_HOME"
            faults.append(Missing("NCCL's nccl.h and libnccl.so", remedy))
        return faults


def output(command: Sequence[str | Path]) -> str | None:
    """What `command` prints; None if it is missing, fails or takes longer than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or done.stderr.strip()


def _version(*command: str) -> str | None:
    """The first line of `command --version`, or None."""
    text = output([*command, "--version"])
    return text.splitlines()[0] if text else None


def compiler() -> str | None:
    """The version of the C++ compiler, or None. As for CMake, `CXX` names another one than c++."""
    return _version(*(os.environ.get("CXX") or "c++").split())


def make() -> str | None:
    """The version of make, or None."""
    return _version("make")


@functools.cache
def mpi() -> str | None:
    """The version of the MPI that Horovod would be built with; None without its compiler mpicxx."""
    if shutil.which("mpicxx") is None:
        return None
    return _version("mpirun") or _version("mpicxx") or "unknown"


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
        # nvcc can be a wrapper for one in another folder; the toolkit is where the headers are.
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
    """The NVIDIA GPUs that the driver lists, a line for each."""
    return (output(["nvidia-smi", "-L"]) or "").splitlines()


def architecture() -> str:
    """The machine's architecture, and the processor features that Horovod's build enables."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        flags = None
    present = flags[1].split() if flags else []
    return " ".join([platform.machine(), *(flag for flag in _ARCH_FLAGS if flag in present)])


def python_for(name: str) -> Path | None:
    """The interpreter to build the runtime `name` with: this one if the pins allow it, or else one on PATH."""
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
    if python == Path(getattr(sys, "_base_executable", sys.executable)):
        return f"{sysconfig.get_python_version()} {sysconfig.get_config_var('SOABI')}"
    probe = "import sysconfig; print(sysconfig.get_python_version(), sysconfig.get_config_var('SOABI'))"
    return output([python, "-c", probe]) or str(python)


def missing(names: Iterable[str]) -> list[Missing]:
    """Everything that is missing on this machine for building the runtimes `names`."""
    faults = []
    if compiler() is None:
        faults.append(Missing("a C++ compiler (g++)", "sudo apt-get install g++"))
    if make() is None:
        faults.append(Missing("make", "sudo apt-get install make"))
    for name in names:
        python = python_for(name)
        if python is None:
            wanted = " or ".join(f"{major}.{minor}" for major, minor in RUNTIMES[name].pythons)
            what = f"Python {wanted} for the runtime '{name}' (this is {platform.python_version()})"
            faults.append(Missing(what, "put such a pythonX.Y on PATH"))
            continue
        parts = {"dev": f"the headers of {python} (Python.h)", "venv": f"the module venv of {python}"}
        lacking = output([python, "-c", _PRINT_LACKING])
        for part in parts if lacking is None else lacking.split():
            debian = f"python{python_abi(python).split()[0]}-{part}"
            faults.append(Missing(parts[part], f"sudo apt-get install {debian}"))
    return list(dict.fromkeys(faults))


def require(names: Iterable[str]) -> None:
    """Raise RequestError with everything that is missing, if this machine cannot build the runtimes `names`."""
    refuse("building a runtime needs what is missing here", missing(names))


def refuse(why: str, faults: list[Missing]) -> None:
    """Raise RequestError with a line for each fault, if there are any."""
    if faults:
        raise RequestError("\n".join([f"{why}:", *(f"  {fault.what}: {fault.remedy}" for fault in faults)]))


def decide_gpu(name: str, gpu: bool | None) -> bool:
    """Whether to build the runtime `name` for GPUs: as requested, or else if there are a suitable CUDA and NCCL.

    Raises RequestError if GPUs are requested and CUDA or NCCL is missing or not suitable.
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
