"""What this machine has for a Horovod build: interpreters, compiler, MPI, GPUs, processor."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from hvdkit.errors import RequestError
from hvdkit.runtimes import cuda, pins
from hvdkit.runtimes.cuda import Missing
from hvdkit.runtimes.process import output

# What Horovod's CMake lists enable if the processor has it, by the names in /proc/cpuinfo.
_ARCH_FLAGS = ("avx", "f16c", "fma")
SHARED_MEMORY_PROBE = Path(__file__).with_name("shared_memory_probe.py")
# Prints `dev` without the headers of the interpreter, `venv` without its venv with ensurepip.
_PRINT_LACKING = """
import importlib.util, os, sysconfig
if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("dev")
if importlib.util.find_spec("ensurepip") is None:
    print("venv")
"""


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
    """The version of the MPI that Horovod would be built with; None if it cannot compile.

    Debian's openmpi-bin has the compiler mpicxx, and its headers are in libopenmpi-dev.
    """
    if output(["mpicxx", "-E", "-include", "mpi.h", "-x", "c++", os.devnull]) is None:
        return None
    return _version("mpirun") or _version("mpicxx") or "unknown"


def gpus() -> list[str]:
    """The NVIDIA GPUs that the driver lists, a line for each."""
    return (output(["nvidia-smi", "-L"]) or "").splitlines()


def gpu_memory() -> list[int]:
    """The memory of each NVIDIA GPU in bytes."""
    text = output(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]) or ""
    return [int(line) * 2**20 for line in text.splitlines() if line.strip().isdecimal()]


def memory(root: Path = Path("/")) -> int:
    """The memory of this machine in bytes, or what the control group of this process, or one above it, may use of it.

    `root` has `proc` and `sys`.
    """
    limits, groups = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")], list[Path]()
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("memory", ""):
                group = Path("sys/fs/cgroup", controllers, path.lstrip("/"))
                groups += [group, *group.parents[:-3]]  # up to sys/fs/cgroup
    for group in groups:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((root / group / name).read_text()))
    return min(limits)


def shared_memory_fault() -> str | None:
    """Why ranks of one host must talk through sockets here; None where they can share memory. Starts two processes."""
    said = output([sys.executable, "-I", SHARED_MEMORY_PROBE]) or "no answer within 20 s"
    return None if said == "works" else said


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
    versions = pins.ALL[name].pythons
    if sys.version_info[:2] in versions:
        # Not sys.executable: in an environment, its links would tie the runtime to that environment.
        return Path(getattr(sys, "_base_executable", sys.executable))
    for major, minor in versions:
        if program := shutil.which(f"python{major}.{minor}"):
            return Path(program)
    return None


def python_abi(python: Path) -> str:
    """An interpreter's version without its patch level, and its binary interface: `3.11 cpython-311-x86_64-linux-gnu`.

    A later patch level runs the same environments and extensions.
    """
    if python == Path(getattr(sys, "_base_executable", sys.executable)):
        return f"{sysconfig.get_python_version()} {sysconfig.get_config_var('SOABI')}"
    probe = "import sysconfig; print(sysconfig.get_python_version(), sysconfig.get_config_var('SOABI'))"
    return output([python, "-c", probe]) or str(python)


def missing(names: Iterable[str], compiling: bool = True) -> list[Missing]:
    """Everything that is missing on this machine for building the runtimes `names`, with or without a compilation."""
    faults = []
    if compiling and compiler() is None:
        faults.append(Missing("a C++ compiler (g++)", "sudo apt-get install g++"))
    if compiling and make() is None:
        faults.append(Missing("make", "sudo apt-get install make"))
    for name in names:
        python = python_for(name)
        if python is None:
            wanted = " or ".join(f"{major}.{minor}" for major, minor in pins.ALL[name].pythons)
            what = f"Python {wanted} for the runtime '{name}' (this is {platform.python_version()})"
            faults.append(Missing(what, "put such a pythonX.Y on PATH"))
            continue
        packages = {"dev": f"the headers of {python} (Python.h)", "venv": f"the module venv of {python}"}
        lacking = output([python, "-c", _PRINT_LACKING])
        for suffix in packages if lacking is None else lacking.split():
            if suffix == "dev" and not compiling:
                continue
            debian = f"python{python_abi(python).split()[0]}-{suffix}"
            faults.append(Missing(packages[suffix], f"sudo apt-get install {debian}"))
    return list(dict.fromkeys(faults))


def require(names: Iterable[str], compiling: bool = True) -> None:
    """Raise RequestError with everything that is missing, if this machine cannot build the runtimes `names`."""
    refuse("building a runtime needs what is missing here", missing(names, compiling))


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
    toolkit, pin = cuda.find(), pins.ALL[name]
    # Without a request a GPU build is made only where the machine has all of it.
    faults = toolkit.missing(nccl=not (gpu and pin.brings_nccl))
    if toolkit.nvcc and toolkit.nvcc.major != pin.cuda:
        here = f"{toolkit.nvcc.version} in {toolkit.nvcc.home}"
        what = f"CUDA {pin.cuda}, which {pin.module} {pin.version(gpu=True)} is for (here {here})"
        remedy = f"name its folder in CUDA_HOME, or build for the CPU: `hvdkit runtime build {name} --cpu`"
        faults.append(Missing(what, remedy))
    if gpu:
        refuse("--gpu needs what is missing here", faults)
    return not faults
