"""Runtimes whose frameworks are imported once: each rank is a fresh process, forked where the import is done already.

For tests of what ranks compute, which start many of them. They are real processes over real Horovod, below hvdkit's own
rank agents; only the import is shared. The environment that /proc shows is a rank's own, so a mark in it finds ranks.
Tests of how they start and hang use the runtimes themselves: a rank here is no child of its agent, and its command line
in /proc is the server's.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hvdkit import paths
from hvdkit.runtimes import pins, store
from tests import hygiene
from tests.warm.client import COMMAND, variables
from tests.warm.server import ROOM

HERE = Path(__file__).resolve().parent
ROOM_BYTES = 1 << 15  # more than the environment of any rank


@contextmanager
def runtimes() -> Iterator[Path]:
    """A folder for HVDKIT_RUNTIMES, in the place of the one in force. The servers end with this."""
    # Of each of two ranks on two cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
    environment.pop(hygiene.MARK, None)  # the servers outlive the file that asks for them first
    environment[ROOM] = "." * ROOM_BYTES
    with ExitStack() as stack:
        # not in pytest's own folder: the path of a socket is short
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdkit-warm-")))
        for name, runtime in {name: store.load(name) for name in pins.RUNTIMES}.items():
            if runtime is None:
                continue  # who needs it is told so by hvdkit
            made = folder / name / "bin" / "python"
            made.parent.mkdir(parents=True)
            words = [sys.executable, "-IS", str(HERE / "client.py"), str(runtime.python), str(folder)]
            made.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            made.chmod(0o755)
            made.with_name("horovodrun").symlink_to(runtime.python.with_name("horovodrun"))
            record = runtime.model_copy(update={"python": made})
            (folder / name / "runtime.json").write_text(record.model_dump_json())
        for framework, name in pins.FRAMEWORKS.items():
            runtime = store.load(name)
            if runtime is not None:
                stack.enter_context(server(folder / framework, runtime.python, paths.script(framework), environment))
        stack.enter_context(server(folder / COMMAND.stem, Path(sys.executable), COMMAND, environment))
        yield folder


def command_line() -> list[str]:
    """The words before a command: in a process with its imports where the runtimes in force are `runtimes()`."""
    folder = Path(os.environ.get("HVDKIT_RUNTIMES", ""))
    if not (folder / f"{COMMAND.stem}.socket").exists():
        return [sys.executable, "-m", "hvdkit"]
    return [sys.executable, "-IS", str(HERE / "client.py"), sys.executable, str(folder), str(COMMAND)]


@contextmanager
def server(place: Path, python: Path, script: Path, environment: dict[str, str]) -> Iterator[None]:
    """A server at PLACE.socket, which makes the script's imports when it is first asked for a process."""
    place.with_suffix(".json").write_text(json.dumps(variables(environment)))
    command = [python, HERE / "server.py", place.with_suffix(".socket"), script]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"ready\n", command
        try:
            yield
        finally:
            process.stdin.close()
