"""Programs whose answer is read, with a limit on its size and on their time."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_BYTES = 2**20
_LOOK_S = 0.05  # whether it has ended: what it has left in the background may hold its pipes open


def answer(
    command: Sequence[str | Path], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end without input; its status and what it printed, as text.

    Raises OSError where it cannot be started or prints more than MOST_BYTES bytes (EFBIG), subprocess.TimeoutExpired
    past `timeout_s` seconds; it and all of its process group have been killed then.
    """
    until, pipe = time.monotonic() + timeout_s, subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    ) as process, selectors.DefaultSelector() as selector:  # fmt: skip
        printed = {process.stdout: bytearray(), process.stderr: bytearray()}
        try:
            for stream in printed:
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, printed[stream])
            while selector.get_map():
                ended, ready = process.poll() is not None, selector.select(_LOOK_S)
                for key, _ in ready:
                    data = os.read(key.fd, 2**16)
                    key.data.extend(data)
                    if not data:
                        selector.unregister(key.fileobj)
                if sum(map(len, printed.values())) > MOST_BYTES:
                    raise OSError(errno.EFBIG, f"it prints more than {MOST_BYTES >> 20} MiB")
                if time.monotonic() > until:
                    raise subprocess.TimeoutExpired(command, timeout_s)
                if ended and not ready:
                    break
            process.wait(max(0.0, until - time.monotonic()))
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    said, complained = (stream.decode("utf-8", "replace") for stream in printed.values())
    return subprocess.CompletedProcess(command, process.returncode, said, complained)
