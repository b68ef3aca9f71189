"""`hvdkit horovod wheel`: a Horovod for any environment, as a wheel that pip installs there."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.console import Console

from hvdkit.commands.request import Argument, Option, Request, say
from hvdkit.errors import RequestError, RunError
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import direct
from hvdkit.runtimes import pins, store, wheel
from hvdkit.runtimes.collectives_proof import RANKS
from hvdkit.runtimes.environment import OLDEST_PYTHON
from hvdkit.runtimes.process import BuildLog, Cancellation, output, pip_of, unwritable
from hvdkit.runtimes.progress import COMPILE, PROVE, BuildProgress
from hvdkit.runtimes.target import Target, find

_PROOF = Path(wheel.__file__).with_name("collectives_proof.py")
_PROOF_TIMEOUT_S = 300


class HorovodWheelRequest(Request):
    """Build a Horovod for the environment of `python`, or for the runtimes of `frameworks`, and test it there.

    Without either, it is built for each runtime of a framework that is there. The wheels go to the folder `out`; no
    environment is changed. `gpu` is as for `hvdkit runtime build`.
    """

    frameworks: Annotated[
        list[str] | None, Argument("pytorch, tensorflow, keras, mxnet: for their runtimes", shown="all runtimes")
    ] = None
    python: Annotated[Path | None, Option("an interpreter of your own, with its frameworks, in place of runtimes")] = (
        None
    )
    gpu: Annotated[bool | None, Option("", ("--gpu/--cpu",), shown="GPU where CUDA is found")] = None
    out: Annotated[Path, Option("the folder of the wheels")] = Path()


def run(request: HorovodWheelRequest) -> list[Path]:
    """The wheels. Raises RequestError if Horovod cannot be built for that environment, a runtime is not built or `out`
    cannot be written, RunError if a build or a test fails."""
    out = request.out
    targets = [find(python, request.gpu) for python in _interpreters(request)]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"--out: {error.filename or out}: {error.strerror}; name a folder that can be made"
        ) from error
    made = []
    for target in targets:
        say([f"Horovod for {target.describe()} in {target.python}"])
        made.append(wheel.publish(proved(target, Console(stderr=True)), target, out))
    return made


def _interpreters(request: HorovodWheelRequest) -> list[Path]:
    if request.python:
        if request.frameworks:
            raise RequestError("--python, FRAMEWORKS: expected one of them, got both")
        return [request.python]
    runtimes = [store.find(name) for name in request.frameworks or ()]
    if not request.frameworks and not (runtimes := [r for r in store.installed() if r.name in pins.RUNTIMES]):
        raise RequestError("no runtime is built; run `hvdkit runtime build`, or name an interpreter with --python")
    return list(dict.fromkeys(runtime.python for runtime in runtimes))


def lines(request: HorovodWheelRequest, result: list[Path]) -> Iterator[str]:
    """Where they are, and how they are installed."""
    yield from map(str, result)
    if request.python:
        yield f"install it: {install_command(request.python, result[0])}"
        return
    for made in result:
        version = made.name.split("-")[1]
        framework = version.partition("+")[2].partition(".hvdkit")[0]
        links = shlex.quote(str(request.out))
        yield f"install it beside {framework}: pip install --find-links {links} horovod=={version}"


def install_command(python: Path, wheel: Path) -> str:
    """The command that installs the wheel `made` into the environment of `python`, which may have no pip."""
    has_pip = output([python, "-c", "import pip; print(pip)"]) is not None
    return f"{pip_of(python, has_pip)} install {shlex.quote(str(wheel))}"


def install(python: Path, console: Console) -> None:
    """Build Horovod for the environment of `python`, test it and install it there, for a runtime of hvdkit.

    Raises as `run` does.
    """
    target = find(python, None, OLDEST_PYTHON)
    wheel = proved(target, console)
    with BuildLog(store.root() / "logs" / "horovod-install.log", Cancellation()) as log:
        log.install("installing Horovod", python, "--force-reinstall", "--no-deps", wheel)
        log.install("installing what Horovod needs", python, wheel)


def proved(target: Target, console: Console) -> Path:
    """Horovod's wheel for `target` in the cache, tested. Raises RunError if the build or the test fails."""
    name, cancelled = "horovod", Cancellation()
    file = store.root() / "logs" / f"horovod-{os.getpid()}.log"
    with BuildLog(file, cancelled) as log, BuildProgress(console, [name]) as progress:
        try:
            with tempfile.TemporaryDirectory(prefix="hvdkit-horovod-") as folder:
                wheel = obtain(name, target, Path(folder) / "build", log, progress)
                progress.stage(name, PROVE, f"testing it on {RANKS} processes")
                prove(target, wheel, Path(folder) / "proof", log)
        except BaseException as error:
            cancelled.set()
            progress.end(name, "failed", good=False)
            if isinstance(error, OSError):
                raise unwritable(error, Path(tempfile.gettempdir())) from error
            raise
        progress.end(name, f"tested: {wheel.name}", good=True)
    return wheel


def obtain(name: str, target: Target, scratch: Path, log: BuildLog, progress: BuildProgress) -> Path:
    """Horovod's wheel for `target`, from the cache or else compiled, as `wheel.obtain`; `progress` shows which."""
    if wheel.cached(target):
        progress.stage(name, COMPILE, "Horovod is in the cache, compiled")
        progress.skip(name)
    else:
        progress.stage(name, COMPILE, "compiling Horovod")
    return wheel.obtain(target, scratch, log, lambda percent: progress.advance(name, percent / 100))


def prove(target: Target, wheel: Path, folder: Path, log: BuildLog) -> None:
    """Run every collective of each framework with the wheel `made`, which is installed into `folder`, on two ranks.

    Raises RunError with the failing rank's output, or if a rank hangs.
    """
    python = target.python
    assert python is not None
    log.install("installing Horovod for its test", python, "--target", folder / "installed", wheel)
    for module in target.modules:
        began = time.monotonic()

        def on_tick(began: float = began, module: str = module) -> None:
            if time.monotonic() - began > _PROOF_TIMEOUT_S:
                raise RunError(f"the test of horovod.{module} did not end within {_PROOF_TIMEOUT_S} s")

        job = Job(
            python=python,
            arguments=[str(_PROOF), module],
            np=RANKS,
            hosts=parse_hosts(None, RANKS),
            environment={
                "PYTHONPATH": str(folder / "installed"),
                "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",  # over Gloo, so that it runs where there is no GPU
            },
            log_dir=folder / module,
        )
        direct.run(job, on_tick)
        log.write((folder / module / "rank-0.log").read_text(encoding="utf-8"))
