"""What Horovod is built for: an interpreter of a runtime or of a user's environment, and the frameworks in it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from hvdkit.errors import RequestError, RunError
from hvdkit.runtimes import cuda, machine, pins, store
from hvdkit.runtimes.cuda import Missing
from hvdkit.runtimes.process import ask, pip_of

OLDEST_PYTHON = (3, 9)
_PROBE = Path(__file__).with_name("interpreter_probe.py")
_KEYS = {"python", "implementation", "machine", "headers", "pip", "versions", "cuda"}


@dataclass(frozen=True)
class Target:
    """An interpreter, and the frameworks in it for which Horovod gets a binding.

    `versions` maps their modules (torch, tensorflow, mxnet), and numpy, to the installed versions, with local parts
    such as `+cpu`. `gpu` selects a build with CUDA and NCCL.
    """

    python: Path | None
    versions: Mapping[str, str]
    gpu: bool = False

    @property
    def modules(self) -> list[str]:
        """The modules of the frameworks."""
        return [pin.module for pin in pins.RUNTIMES.values() if pin.module in self.versions]

    def describe(self) -> str:
        """`torch 2.13.0+cpu, tensorflow 2.21.0`."""
        return ", ".join(f"{module} {self.versions[module]}" for module in self.modules)


def find(python: Path, gpu: bool | None, oldest: tuple[int, int] = OLDEST_PYTHON) -> Target:
    """What Horovod can be built for in the environment of the interpreter `python`; nothing in it is changed.

    `gpu` asks for a build with (True) or without (False) CUDA and NCCL; None takes them where both are found and fit
    every framework. `oldest` is the first Python that will do. Raises RequestError with all faults, each with its
    remedy.
    """
    python = runnable(python)
    facts = _probe(python)
    faults = [*_interpreter_faults(python, facts, oldest), *_framework_faults(facts["versions"]), *machine.missing(())]
    on_gpu = _gpu_faults(python, facts)
    if gpu:
        faults += on_gpu
    machine.refuse(f"Horovod cannot be built for {python}", faults)
    return Target(python, facts["versions"], not on_gpu if gpu is None else gpu)


def versions(python: Path) -> dict[str, str]:
    """The versions of the frameworks and of NumPy in an environment, with local parts such as `+cpu`.

    Nothing is imported. Raises RequestError if the interpreter does not answer.
    """
    return dict(_probe(python)["versions"])


def runnable(python: Path) -> Path:
    """An interpreter's absolute path. Raises RequestError where this process cannot run it."""
    # Not resolve(): the interpreter of a virtual environment is a link, and following it would leave it.
    python = python.absolute()
    if fault := store.fault_of(python):
        raise RequestError(f"{python}: it {fault}; name the program itself, such as ENVIRONMENT/bin/python")
    return python


def _probe(python: Path) -> dict[str, Any]:
    modules = [f"{pin.module}={','.join(pin.distributions)}" for pin in pins.RUNTIMES.values()]
    try:
        return ask(python, OLDEST_PYTHON, _PROBE, *modules, keys=_KEYS)
    except RunError as error:
        raise RequestError(str(error)) from error


def _interpreter_faults(python: Path, facts: Mapping[str, Any], oldest: tuple[int, int]) -> list[Missing]:
    faults = []
    version = ".".join(facts["python"].split(".")[:2])
    if facts["implementation"] != "CPython" or tuple(map(int, version.split("."))) < oldest:
        wanted = ".".join(map(str, oldest))
        what = f"{facts['implementation']} {facts['python']}, expected CPython {wanted} or later"
        faults.append(Missing(what, "name another interpreter"))
    if facts["machine"] != platform.machine():
        what = f"it is for {facts['machine']}, this machine is {platform.machine()}"
        faults.append(Missing(what, "build on a machine of that kind"))
    if not facts["headers"]:
        what = f"the headers of {python} (Python.h)"
        faults.append(Missing(what, f"sudo apt-get install python{version}-dev, or a Python that brings them"))
    if "numpy" not in facts["versions"]:
        faults.append(Missing("numpy is not installed", f"{pip_of(python, facts['pip'])} install numpy"))
    return faults


def _gpu_faults(python: Path, facts: Mapping[str, Any]) -> list[Missing]:
    """Why Horovod cannot be built with CUDA and NCCL."""
    here = cuda.find(python)
    faults = here.missing()
    for module, wanted in facts["cuda"].items():
        framework = f"{module} {facts['versions'][module]}"
        if wanted is None:
            remedy = f"install a CUDA build of {module} there, or use --cpu"
            faults.append(Missing(f"{framework} is a CPU build", remedy))
        elif here.nvcc and int(wanted.split(".")[0]) != here.nvcc.major:
            what = f"{framework} is for CUDA {wanted}, the compiler in {here.nvcc.home} is of {here.nvcc.version}"
            faults.append(Missing(what, "name the folder of the other CUDA in CUDA_HOME, or use --cpu"))
    return faults


def _framework_faults(versions: Mapping[str, str]) -> list[Missing]:
    modules = {pin.module: pin for pin in pins.RUNTIMES.values()}
    present = [module for module in modules if module in versions]
    if not present:
        return [Missing(f"none of {', '.join(modules)} is installed", "install the framework there first")]
    faults = []
    for module in present:
        try:
            old = Version(versions[module]) < Version(modules[module].oldest)
        except InvalidVersion:
            old = True
        if old:
            what = f"{module} {versions[module]}, expected {modules[module].oldest} or later"
            faults.append(Missing(what, f"install a later {module} there"))
    return faults
