"""Horovod's rendezvous server, while a job runs."""

from __future__ import annotations

import contextlib
import select
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hvdkit.errors import RequestError, RunError
from hvdkit.launch.hosts import shown
from hvdkit.launch.job import Job

_SERVER = Path(__file__).with_name("launchers") / "rendezvous.py"
_START_TIMEOUT_S = 30.0


@contextlib.contextmanager
def rendezvous(job: Job, address: str) -> Iterator[int]:
    """Horovod's rendezvous server, at an address that all ranks reach; yields its port.

    It runs under the runtime's interpreter, as the driver has no Horovod. Its port is open when it is yielded; Horovod
    is loaded while the ranks start.

    Raises RequestError or RunError if the server does not start: the latter at the end, in place of the ranks' failure.
    """
    command = [str(job.python), str(_SERVER), address, shown(job.hosts), str(job.np)]
    with tempfile.TemporaryFile() as errors, contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=job.base_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,  # else `select` does not see a line that was read with the one before
                    stderr=errors,
                    start_new_session=True,  # a terminal's Ctrl-C reaches only the launcher
                )
            )
        except OSError as error:
            raise RequestError(
                f"{job.python}: cannot be started ({error.strerror}); build it anew with `hvdkit runtime build`"
            ) from error
        stack.callback(server.kill)
        port, failure = _line(server), None
        if port:
            try:
                yield int(port)
            except RunError as error:
                failure = error
        if not port or not _line(server):
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2] or "it said nothing"
            raise RunError(
                f"{job.python}: Horovod's rendezvous server did not start: {said}; look with `hvdkit doctor`"
            ) from failure
        if failure is not None:
            raise failure


def _line(server: subprocess.Popen[bytes]) -> bytes:
    """The next line that the server prints; empty where none comes."""
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], _START_TIMEOUT_S)
    return server.stdout.readline() if ready else b""
