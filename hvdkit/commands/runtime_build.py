"""`hvdkit runtime build`: environments with a framework and a Horovod that works.

While one runtime's Horovod compiles, the others' packages are fetched and installed, and Horovod is proved where it is
compiled already.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Annotated

from rich.console import Console

from hvdkit.commands import horovod_wheel
from hvdkit.commands.request import Argument, Option, Request
from hvdkit.errors import HvdkitError, RequestError, RunError
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import direct
from hvdkit.runtimes import cuda, environment, machine, pins, store, wheel
from hvdkit.runtimes import target as targets
from hvdkit.runtimes.process import BuildLog, Cancellation, unwritable
from hvdkit.runtimes.progress import COMPILE, CREATE, INSTALL, PROVE, BuildProgress
from hvdkit.runtimes.store import Runtime
from hvdkit.runtimes.target import Target
from hvdkit.worker.proof import RANKS

# The quickest to install first, so that the compiler is soon at work.
_ORDER = ("mxnet", "pytorch", "tensorflow", "deepspeed")

_INSTALLS = 2
_CORES_OF_A_COMPILE = 3  # what one keeps busy: three large sources, then one process that links


class RuntimeBuildRequest(Request):
    """Build the runtimes `names`, or those of all frameworks, that are missing or out of date, and test each.

    `gpu` forces a build with (True) or without (False) CUDA and NCCL; None takes them where both are found. A user's
    own interpreter, added under a runtime's name, is replaced only where that name is asked for. With `find_links`,
    Horovod is a wheel that `hvdkit horovod wheel` has written into that folder, and nothing is compiled.
    """

    names: Annotated[
        list[str] | None, Argument("pytorch, tensorflow, keras, mxnet, deepspeed", shown="all but the last")
    ] = None
    gpu: Annotated[bool | None, Option("", ("--gpu/--cpu",), shown="GPU where CUDA is found")] = None
    find_links: Annotated[
        Path | None, Option("take Horovod from the wheels in this folder and compile nothing", metavar="DIR")
    ] = None


def run(request: RuntimeBuildRequest) -> None:
    """Build. Raises RequestError where a name is unknown or this machine lacks a tool, RunError where a build fails;
    the other runtimes are still built."""
    console, gpu = Console(), request.gpu
    wanted = checked(request.names)
    on_gpu = {name: machine.decide_gpu(name, gpu) for name in wanted}
    ready = [r for name in wanted if (r := store.load(name)) and _serves(r, gpu, bool(request.names))]
    if ready:
        names_ready = ", ".join(f"{runtime.name} ({runtime.describe()})" for runtime in ready)
        console.print(f"ready: {names_ready}", markup=False, highlight=False, soft_wrap=True)
    if todo := {name: on_gpu[name] for name in _ORDER if name in on_gpu.keys() - {runtime.name for runtime in ready}}:
        wheels = {name: wheel.published(name, todo[name], request.find_links) for name in todo if request.find_links}
        machine.require(todo, compiling=not wheels)
        _Build(todo, console, wheels).run()


def lines(request: RuntimeBuildRequest, result: None) -> Iterator[str]:
    """Nothing: the progress has said it."""
    yield from ()


def _serves(runtime: Runtime, gpu: bool | None, named: bool) -> bool:
    """Whether a runtime answers the request, so that nothing has to be built."""
    if runtime.added:
        return not named
    # Without --gpu or --cpu the earlier choice stays; the doctor mentions a CUDA that was installed since.
    return gpu in (None, runtime.gpu) and runtime.key == current_key(runtime.name, runtime.gpu)


def checked(names: Iterable[str] | None) -> list[str]:
    """The runtimes of these names or frameworks, or of all, in order. Raises RequestError for unknown names."""
    chosen, known = {pins.FRAMEWORKS.get(name, name) for name in names or pins.RUNTIMES}, pins.ALL
    if faults := [store.unknown("runtime", name, known) for name in sorted(chosen - set(known))]:
        raise RequestError("\n".join(faults))
    return [name for name in known if name in chosen]


def current_key(name: str, gpu: bool) -> str:
    """The key that the runtime `name` would be built under now."""
    return wheel.key(wheel.runtime_ingredients(name, gpu))


class _Build:
    """One run of the build, with a thread for each runtime, from its environment to its proof.

    Installing is one process that waits for the network and the disk, so two are at it at once. A compile keeps a few
    cores busy, but not at its ends, where others install or prove.
    """

    def __init__(self, gpu: dict[str, bool], console: Console, wheels: dict[str, Path]) -> None:
        """`gpu` has for each runtime to build, in order, whether with CUDA and NCCL; `wheels` are compiled already."""
        self._gpu, self._wheels = gpu, wheels
        self._progress = BuildProgress(console, list(gpu))
        self._cancelled = Cancellation()
        self._installing = Semaphore(_INSTALLS)
        self._compiling = Semaphore(max(1, len(os.sched_getaffinity(0)) // _CORES_OF_A_COMPILE))

    def run(self) -> None:
        """Build all; raises RunError with every failure at the end."""
        with self._progress, ThreadPoolExecutor(len(self._gpu), "build") as pool:
            try:
                ends = [pool.submit(self._runtime, name) for name in self._gpu]
                faults = [fault for end in ends if (fault := end.exception()) is not None]
            except BaseException:
                # Ctrl-C: end what runs, start nothing more; leaving the pool then waits a moment only.
                self._cancelled.set()
                raise
        for fault in faults:
            if not isinstance(fault, HvdkitError):
                raise fault
        if faults:
            raise RunError("\n".join(str(fault) for fault in faults))

    def _runtime(self, name: str) -> None:
        """Build one, and show how that ended."""
        try:
            self._progress.end(name, self._built(name), good=True)
        except BaseException as error:
            self._progress.end(name, "interrupted" if self._cancelled.is_set() else "failed", good=False)
            if isinstance(error, OSError):
                raise RunError(f"runtime '{name}': {unwritable(error, store.root())}") from error
            if isinstance(error, HvdkitError):
                raise RunError(f"runtime '{name}': {error}") from error
            raise

    def _built(self, name: str) -> str:
        """Build one, and say what it is. Its lock comes before its turn, so two builds cannot wait for each other."""
        gpu, python = self._gpu[name], store.python_of(name)
        key, progress = current_key(name, gpu), self._progress
        waits = partial(progress.waits, name, "another build is at work on it; waiting")
        with store.lock(name, waits, self._cancelled):
            runtime = store.load(name)
            if runtime is not None and runtime.key == key:
                return "made by another build"
            with BuildLog(store.root() / "logs" / f"{name}.log", self._cancelled) as log:
                with self._turn(self._installing):
                    progress.stage(name, CREATE, "making the environment")
                    environment.create(name, log)
                    progress.stage(name, INSTALL, "installing the framework")
                    environment.install_framework(name, gpu, log)
                with self._turn(self._compiling):
                    wheel = self._wheel(name, log)
                progress.stage(name, PROVE, "installing Horovod and testing it on two processes")
                environment.install_horovod(name, wheel, log)
                runtime = examined(name, python, key=key, gpu=gpu, added=False)
                prove(runtime, pins.framework_of(name), self._stop_if_cancelled)
                store.save(runtime)
                return f"ready: {runtime.describe()}"

    def _wheel(self, name: str, log: BuildLog) -> Path:
        """Horovod's wheel, given, from the cache or compiled."""
        if name in self._wheels:
            self._progress.stage(name, COMPILE, f"Horovod is {self._wheels[name]}")
            self._progress.skip(name)
            return self._wheels[name]
        python = store.python_of(name)
        target = Target(python, targets.versions(python), self._gpu[name])
        if target.gpu:
            machine.refuse("a build with --gpu lacks", cuda.find(target.python).missing())
        # What a build that is killed leaves there goes with the runtime's folder, when the next one begins.
        return horovod_wheel.obtain(name, target, store.folder(name) / "horovod", log, self._progress)

    @contextmanager
    def _turn(self, lane: Semaphore) -> Iterator[None]:
        with lane:
            self._stop_if_cancelled()
            yield

    def _stop_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise RunError("cancelled")


def examined(name: str, python: Path, *, key: str, gpu: bool, added: bool) -> Runtime:
    """The runtime as probe.py finds it. Raises RequestError, all faults at once, where it cannot serve."""
    draft = Runtime(name=name, python=python, key=key, gpu=gpu, added=added, versions={}, controllers=[], operations=[])
    runtime, faults = environment.examine(draft)
    machine.refuse(f"{python} cannot serve as the runtime '{name}'", faults)
    return runtime


def prove(runtime: Runtime, framework: str, on_tick: Callable[[], None] | None = None) -> None:
    """Test Horovod and the adapter of `framework` in `runtime`. Raises RunError with the failing rank's output.

    `on_tick` is called ten times a second; an exception from it ends the test.
    """
    # NCCL refuses two ranks on one GPU, so on a machine with a single one only the CPU's side is tested.
    device = "gpu" if runtime.gpu and len(machine.gpus()) >= RANKS else "cpu"
    with tempfile.TemporaryDirectory(prefix="hvdkit-proof-") as folder:
        job = Job(
            python=runtime.python,
            arguments=["-m", "hvdkit.worker.proof", framework, device],
            np=RANKS,
            hosts=parse_hosts(None, RANKS),
            environment={**runtime.environment, "OMP_NUM_THREADS": "1"},
            log_dir=Path(folder),
        )
        direct.run(job, on_tick)
