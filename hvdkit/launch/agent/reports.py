"""What an agent reports to the launcher: a line of `MARK` and JSON for each event, on its standard output.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

MARK = "@hvdkit "
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def own_rank() -> int:
    """The rank below this agent, as Horovod reads it: set by Horovod's launchers or by mpirun.

    Raises StopIteration where none of them has set it.
    """
    return int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))


def own_name(rank: int | None) -> str:
    """The name of the files of the command below this agent.

    Under an elastic launcher ranks change as others come and go: a worker goes by its place there.
    """
    if rank is None:
        return "horovodrun"
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        return f"rank-{rank}"
    return "worker-{HOROVOD_HOSTNAME}-{HOROVOD_LOCAL_RANK}".format_map(os.environ)


def report(rank: int | None, name: str, event: str, **facts: object) -> bytes:
    """A line for the launcher."""
    who = {"rank": rank, "name": name, "host": os.environ.get("HOROVOD_HOSTNAME")}
    record = {"event": event, **who, "clock": time.monotonic(), "boot": boot_id(), **facts}
    return (MARK + json.dumps(record)).encode()


def send(line: bytes) -> None:
    """Send a line to the launcher, if there is one."""
    line += b"\n"
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(1, line) :]


def boot_id() -> str | None:
    """The machine's boot: launcher and agent share a monotonic clock where it is the same."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None
