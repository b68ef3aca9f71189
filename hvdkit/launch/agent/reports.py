"""What an agent reports to the launcher: a line of `MARK` and JSON for each event, on its standard output.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

MARK = "@hvdkit "
SHARED = "HVDKIT_SHARED"  # a variable: a file of the launcher, which every host has to see
REPORTS_DONE = "HVDKIT_REPORTS_DONE"  # a variable, which is set if a rank says when it has done its work
PROGRAM_RUNS = "HVDKIT_PROGRAM"  # a variable, which is set if the rank is a program that knows nothing of hvdkit
RANKS = ("rank", "shell-rank", "task")  # roles of agents of ranks; others are of programs that start ranks


class Reports:
    """Reports on the rank that the agent's environment describes, or on a program that starts ranks: no `rank`.

    `name` is that of the command's files. Under an elastic launcher ranks change as others come and go: there a worker
    goes by its place.
    """

    def __init__(self, role: str) -> None:
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        name = "worker-{HOROVOD_HOSTNAME}-{HOROVOD_LOCAL_RANK}" if elastic else "rank-{HOROVOD_RANK}"
        self.rank = int(os.environ["HOROVOD_RANK"]) if role in RANKS else None
        self.name = role if self.rank is None else name.format_map(os.environ)

    def send(self, event: str, **facts: object) -> None:
        """Report an event to the launcher."""
        who = {"rank": self.rank, "name": self.name, "host": os.environ.get("HOROVOD_HOSTNAME")}
        record = {"event": event, **who, "clock": time.monotonic(), "boot": boot_id(), **facts}
        write_line((MARK + json.dumps(record)).encode())


def write_line(line: bytes) -> None:
    """Send a line to the launcher, if there is one."""
    line += b"\n"
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(1, line) :]


def read_failure(path: Path) -> dict[str, Any] | None:
    """A rank's own record of its failure, if it left a readable one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"clock": float(record["clock"]), **{key: record.get(key) for key in ("step", "kind", "message")}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def boot_id() -> str | None:
    """The machine's boot: launcher and agent share a monotonic clock where it is the same."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None
