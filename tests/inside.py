"""The command line in the test's own process, for requests that are refused before anything starts.

It saves each case the 0.6 s in which a process loads the command line. That a process of its own says the same, and
ends with the same status, is tested by those cases that take the `hvdkit` fixture.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

from hvdkit.cli import app


def call(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`hvdkit ARGUMENTS` in that folder: its exit status and what it prints."""
    command = ["hvdkit", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    heeded = signal.getsignal(signal.SIGTERM)  # the command line answers it in its own way
    status: object = None
    try:
        with (
            contextlib.chdir(folder),
            mock.patch.object(sys, "argv", command),
            mock.patch.dict(os.environ, environment),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                app.main()
            except SystemExit as end:
                status = end.code
    finally:
        signal.signal(signal.SIGTERM, heeded)
    assert status is None or isinstance(status, int), status
    return subprocess.CompletedProcess(command, status or 0, out.getvalue(), err.getvalue())
