"""Programs whose answer is read, with a limit on its size and on their time."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from hvdkit.errors import RequestError

MOST_BYTES = 2**20
_LOOK_S = 0.05


def answer(
    command: Sequence[str | Path], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end without input; its status and what it printed, as text.

    Raises OSError where it cannot be started or prints more than MOST_BYTES bytes (EFBIG), subprocess.TimeoutExpired
    past `timeout_s` seconds; it and all of its process group have been killed then.
    """
    until = time.monotonic() + timeout_s
    with TemporaryFile() as printed, TemporaryFile() as complaints, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=printed, stderr=complaints, env=environment, start_new_session=True
    ) as process:  # fmt: skip
        files = printed, complaints  # not pipes, which a process that it leaves in the background would hold open
        try:
            while process.poll() is None:
                if sum(os.fstat(file.fileno()).st_size for file in files) > MOST_BYTES:
                    raise OSError(errno.EFBIG, f"it prints more than {MOST_BYTES >> 20} MiB")
                if time.monotonic() > until:
                    raise subprocess.TimeoutExpired(command, timeout_s)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        for file in files:
            file.seek(0)
        said, complained = (file.read(MOST_BYTES + 1).decode("utf-8", "replace") for file in files)
    if len(said) + len(complained) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it prints more than {MOST_BYTES >> 20} MiB")
    return subprocess.CompletedProcess(command, process.returncode, said, complained)


def said(command: Sequence[str | Path], timeout_s: float, who: str, remedy: str) -> str:
    """What a command prints. Raises RequestError where it cannot be run, fails or gives no answer in time: `who` that
    is, how that shows, and the `remedy`."""
    try:
        done = answer(command, timeout_s)
    except OSError as error:
        raise RequestError(f"{who}: cannot be run ({error.strerror}); {remedy}") from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"{who}: no answer within {timeout_s:.0f} s; {remedy}") from None
    if done.returncode != 0:
        words = done.stderr.strip().rpartition("\n")[2][:200].rstrip(".") or "it said nothing"
        raise RequestError(f"{who}: failed with status {done.returncode}: {words}; {remedy}")
    return done.stdout
