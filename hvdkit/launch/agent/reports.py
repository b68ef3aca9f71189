"""What a guard tells the launcher: a line of `MARK` and JSON for each event, on its standard output.

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
    """The rank below this guard, as Horovod reads it: set by Horovod's launchers or by mpirun.

    Raises StopIteration where none of them has set it.
    """
    return int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))


def own_name(rank: int | None) -> str:
    """What the traces of the command below this guard are called.

    Under an elastic launcher ranks change as others come and go: there a worker is known by its place.
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


def tell(line: bytes) -> None:
    """To the launcher; without one, to nobody."""
    line += b"\n"
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(1, line) :]


def boot_id() -> str | None:
    """By which a launcher knows whether its monotonic clock is this machine's."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None
