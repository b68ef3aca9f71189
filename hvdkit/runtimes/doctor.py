"""`hvdkit doctor`: what is installed, what is broken and why, and the command that fixes it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from hvdkit.errors import HvdkitError
from hvdkit.runtimes import cuda, environment, machine, pins, store, wheel
from hvdkit.runtimes.cuda import Missing
from hvdkit.runtimes.store import Runtime

# The disk space that a CPU build of a runtime needs at most; CUDA builds take several times as much.
_ROOM_BYTES = 3 << 30


@dataclass(frozen=True)
class Finding:
    """The state of one runtime: ready, not built, being built or broken."""

    name: str
    state: str
    runtime: Runtime | None = None  # as its interpreter answers now, where it does
    faults: list[Missing] = field(default_factory=list)
    notes: list[Missing] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """All findings. A fault breaks something that is needed; a note does not."""

    findings: list[Finding]
    machine: dict[str, str]
    faults: list[Missing]
    notes: list[Missing]

    @property
    def exit_status(self) -> int:
        """1 if something that is needed is broken, else 0."""
        return 1 if self.faults else 0

    def lines(self) -> Iterator[Table | Text | str]:
        """The tables, then each fault and note with what fixes it."""
        runtimes = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for title in ("runtime", "state", "framework", "NumPy", "Horovod", "controllers", "operations"):
            runtimes.add_column(title, no_wrap=True)
        for row in self.findings:
            runtimes.add_row(*_cells(row))
        yield runtimes
        here = Table(box=box.SIMPLE, show_header=False)
        here.add_column(no_wrap=True)
        here.add_column(overflow="fold")
        interpreters = {f"{row.name} runs": str(row.runtime.python) for row in self.findings if row.runtime}
        for what, text in (self.machine | interpreters).items():
            here.add_row(what, text)
        yield here
        for kind, style, items in (("fault", "red", self.faults), ("note", "yellow", self.notes)):
            for item in items:
                yield Text.assemble((kind, style), f": {item.what}\n  remedy: {item.remedy}")
        if not self.faults:
            yield Text("nothing that is there is broken", "green")


def _cells(row: Finding) -> list[str]:
    style = {"ready": "green", "broken": "red"}.get(row.state, "yellow")
    cells = [row.name, f"[{style}]{row.state}[/]"]
    if row.runtime is None:
        return cells
    versions = row.runtime.versions
    pin = pins.ALL[row.name]
    shown = [
        f"{package} {versions[package]}"
        for package in dict.fromkeys((pin.module, "keras", *pin.imports))
        if package in versions
    ]
    cells += ["\n".join(shown), versions.get("numpy", ""), versions.get("horovod", "")]
    return [*cells, ", ".join(row.runtime.controllers), ", ".join(row.runtime.operations)]


def examine() -> Report:
    """Examine the machine and, by a process for each, all runtimes. Takes some seconds.

    As many processes run at once as there are cores, since importing a framework keeps a core busy.
    """
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        looking = [pool.submit(_look_into, name) for name in pins.RUNTIMES]
        looking += [pool.submit(_look_into, name) for name in pins.BASELINES if store.folder(name).exists()]
        here = _machine()
        findings = [looked.result() for looked in looking]
    faults = [fault for row in findings for fault in row.faults]
    notes = [note for row in findings for note in row.notes]
    if to_build := [row.name for row in findings if row.state in ("broken", "not built")]:
        # If a runtime is ready and none is broken, the others may not be needed: an image has one, and no compiler.
        content = not faults and any(row.state == "ready" for row in findings)
        (notes if content else faults).extend(machine.missing(to_build))
        free = _free_bytes(store.root())
        if free < _ROOM_BYTES * len(to_build):
            what = f"{_gib(free)} free for {len(to_build)} runtimes of up to {_gib(_ROOM_BYTES)} in {store.root()}"
            notes.append(Missing(what, "free space or set HVDKIT_RUNTIMES to a folder with more"))
    ready = [row.runtime for row in findings if row.state == "ready" and row.runtime]
    cpu_only = [runtime.name for runtime in ready if "nccl" not in runtime.operations]
    cuda_ = cuda.find()
    for name in cpu_only if machine.gpus() else []:
        pin = pins.ALL[name]
        if cuda_.nvcc is None or cuda_.nvcc.major == pin.cuda:
            first = [item.remedy for item in cuda_.missing(nccl=not pin.brings_nccl)]
            remedy = "; then ".join([*first, f"hvdkit runtime build {name} --gpu"])
            notes.append(Missing(f"a GPU is there, but the Horovod of '{name}' has no NCCL", remedy))
    with_nccl = [runtime.name for runtime in ready if "nccl" in runtime.operations]
    if with_nccl and not machine.gpus():
        here["GPU"] = f"{', '.join(with_nccl)}: built for NCCL; no GPU here"
    return Report(findings, here, faults, notes)


def _look_into(name: str) -> Finding:
    """The state of the runtime `name`."""
    again = f"hvdkit runtime build {name}"
    runtime, why_not = store.inspect(name)
    if runtime is None:
        if store.locked(name):
            return Finding(name, "being built")
        if why_not is None:
            return Finding(name, "not built", notes=[Missing(f"runtime '{name}' is not built", again)])
        return Finding(name, "broken", faults=[Missing(f"runtime '{name}': {why_not}", again)])
    if runtime.added:
        again = f"hvdkit runtime add {name} --python {runtime.python}"
    try:
        runtime, faults = environment.examine(runtime)
    except HvdkitError as error:
        bare = runtime.model_copy(update={"versions": {}, "controllers": [], "operations": []})
        return Finding(name, "broken", bare, faults=[Missing(f"runtime '{name}': {error}", again)])
    faults = [Missing(f"runtime '{name}': {fault.what}", fault.remedy) for fault in faults]
    return Finding(name, "broken" if faults else "ready", runtime, faults, _outdated(runtime))


def _outdated(runtime: Runtime) -> list[Missing]:
    """A note if a build would replace the runtime: because of other pins, or another MPI, CUDA or setting.

    There is none without a compiler, as in an image: nothing can be built there, and its MPI and CUDA are incomplete.
    """
    if machine.compiler() is None:
        return []
    if runtime.added or runtime.key == wheel.key(wheel.runtime_ingredients(runtime.name, runtime.gpu)):
        return []
    what = f"runtime '{runtime.name}' was built from other pins, or with another MPI, CUDA or setting than here now"
    return [Missing(what, f"hvdkit runtime build {runtime.name}")]


def _machine() -> dict[str, str]:
    """What is on this machine for builds and runs."""
    here, fault = cuda.find(), machine.shared_memory_fault()
    return {
        "Python": f"{platform.python_version()} ({machine.python_for('pytorch') or 'none that fits the pins'})",
        "C++ compiler": machine.compiler() or "none",
        "make": machine.make() or "none",
        "MPI": machine.mpi() or "none (Horovod is built with Gloo alone)",
        "GPU": "\n".join(machine.gpus()) or "none",
        "CUDA": f"{here.nvcc.version} ({here.nvcc.home})" if here.nvcc else "none",
        "NCCL": _library(here.nccl),
        "cuDNN": _library(here.cudnn),
        "shared memory": f"not between processes: {fault}" if fault else "works between processes",
        "processor": f"{len(os.sched_getaffinity(0))} cores, {machine.architecture()}",
        "memory": _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "runtimes": f"{store.root()} ({_gib(_free_bytes(store.root()))} free)",
        "cache": f"{store.cache()} ({_gib(_free_bytes(store.cache()))} free)",
    }


def _library(cuda_: cuda.Installed | None) -> str:
    return f"{cuda_.version} ({cuda_.home})" if cuda_ else "none outside the runtimes; frameworks' GPU packages have it"


def _free_bytes(folder: Path) -> int:
    """The free space of the disk of `folder`, which need not exist."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
