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
def rendezvous(job: Job, address: str, enter: tuple[str, ...] = ()) -> Iterator[int]:
    """Horovod's rendezvous server, at an address that all ranks reach; yields its port. `enter` is a command prefix.

    It runs under the runtime's interpreter, as the driver has no Horovod. Ranks are started after it: a rank that finds
    no server gives up after 1.5 s, and the server is up in 0.2 s.

    Raises RequestError or RunError if the server does not start.
    """
    command = [*enter, str(job.python), str(_SERVER), address, shown(job.hosts), str(job.np)]
    with tempfile.TemporaryFile() as errors:
        try:
            server = subprocess.Popen(
                command,
                env=job.base_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # a terminal's Ctrl-C reaches only the launcher
            )
        except OSError as error:
            raise RequestError(
                f"{job.python}: cannot be started ({error.strerror}); build it anew with `hvdkit runtime build`"
            ) from error
        with server:
            try:
                assert server.stdout is not None
                ready, _, _ = select.select([server.stdout], [], [], _START_TIMEOUT_S)
                line = server.stdout.readline() if ready else b""
                if not line.strip().isdigit():
                    errors.seek(0)
                    said = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2] or "it said nothing"
                    raise RunError(
                        f"{job.python}: Horovod's rendezvous server did not start: {said}; look with `hvdkit doctor`"
                    )
                yield int(line)
            finally:
                server.kill()
