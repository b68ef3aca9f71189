"""`hvdkit runtime add`: a user's own interpreter as a runtime."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.console import Console

from hvdkit.commands import horovod_wheel, runtime_build
from hvdkit.commands.request import Argument, Option, Request
from hvdkit.errors import RequestError, RunError
from hvdkit.runtimes import environment, pins, store, target
from hvdkit.runtimes.store import Runtime


class RuntimeAddRequest(Request):
    """Use an interpreter of your own, `python`, as the runtime `name`: it has the framework, and a few packages.

    `build` builds a Horovod for it first and installs it there. A runtime of that name which is there already is
    replaced after the proof.
    """

    name: Annotated[str, Argument("as for build")]
    python: Annotated[Path, Option("the interpreter that has the framework and a Horovod")]
    build: Annotated[bool, Option("build a Horovod for it first, and install it there")] = False


def run(request: RuntimeAddRequest) -> Runtime:
    """Add it. Raises RequestError where the name is unknown, the interpreter cannot be run or lacks something,
    RunError where Horovod's build or proof fails."""
    (name,) = runtime_build.checked([request.name])
    python = target.runnable(request.python)
    if request.build:
        horovod_wheel.install(python, Console(stderr=True))
    with store.lock(name, lambda: print(f"another build is at work on '{name}'; waiting", file=sys.stderr)):
        store.link_hvdkit()
        try:
            runtime = runtime_build.examined(name, python, key="added", gpu=False, added=True)
        except RunError as error:
            raise RequestError(str(error)) from error
        runtime = runtime.model_copy(update={"gpu": "nccl" in runtime.operations})
        runtime_build.prove(runtime, pins.framework_of(name))
        environment.remove(name)
        store.folder(name).mkdir()
        store.save(runtime)
    return runtime


def lines(request: RuntimeAddRequest, result: Runtime) -> Iterator[str]:
    """What it has."""
    yield f"{result.name}: {result.describe()}"
