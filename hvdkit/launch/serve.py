"""Horovod's rendezvous server, while a job runs."""

from __future__ import annotations

import contextlib
import select
import socket
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

    It runs under the runtime's interpreter, as the driver has no Horovod. The port is open when it is yielded, and the
    kernel has chosen it, so it is not in use; interpreter and Horovod are loaded while the ranks start.

    Raises RequestError or RunError if the server does not start: the latter at the end, in place of the ranks' failure.
    """
    with tempfile.TemporaryFile() as errors, contextlib.ExitStack() as stack:
        with socket.create_server((address, 0), backlog=1024) as listening:
            port: int = listening.getsockname()[1]
            words = str(listening.fileno()), shown(job.hosts), str(job.np)
            try:
                server = stack.enter_context(
                    subprocess.Popen(
                        [str(job.python), str(_SERVER), *words],
                        env=job.base_environment(),
                        pass_fds=[listening.fileno()],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        start_new_session=True,  # a terminal's Ctrl-C reaches only the launcher
                    )
                )
            except OSError as error:
                raise RequestError(
                    f"{job.python}: cannot be started ({error.strerror}); build it anew with `hvdkit runtime build`"
                ) from error
        stack.callback(server.kill)
        failure = None
        try:
            yield port
        except RunError as error:
            failure = error
        if not _serves(server):
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2] or "it said nothing"
            raise RunError(
                f"{job.python}: Horovod's rendezvous server did not start: {said}; look with `hvdkit doctor`"
            ) from failure
        if failure is not None:
            raise failure


def _serves(server: subprocess.Popen[bytes]) -> bool:
    """Whether the server has said that it serves."""
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], _START_TIMEOUT_S)
    return bool(ready and server.stdout.readline())
