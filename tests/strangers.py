"""What tests of strangers share: many connections, ports that listen, and another user who reads all command lines."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MANY = 2000
# Another user reads all command lines, again and again.
READER = """
import os
seen = set()
while True:
    for name in os.listdir("/proc"):
        try:
            line = open("/proc/%s/cmdline" % name, "rb").read() if name.isdigit() else b""
        except OSError:
            continue
        if line not in seen:
            seen.add(line)
            print(repr(line), flush=True)
"""


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """More open files for this process than those that it attacks have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * MANY:
        pytest.skip(f"needs {4 * MANY} open files: ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * MANY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def silent(port: int, count: int = MANY) -> list[socket.socket]:
    """Connections that say nothing, as many as there can be."""
    found = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            found.append(socket.create_connection(("127.0.0.1", port), 5))
    return found


def heard(connection: socket.socket) -> bytes:
    """All that comes until the other side closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(4096):
            said += part
    return said


def listening(pid: int) -> dict[int, str]:
    """The ports on which a process listens, and their addresses in hexadecimal."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        inodes |= {f"socket:[{row[9]}]": row[1].split(":") for row in rows if row[3] == "0A"}
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if (address := inodes.get(str(descriptor.readlink()))) is not None:
                found[int(address[1], 16)] = address[0]
    return found


@contextlib.contextmanager
def command_lines(folder: Path) -> Iterator[Path]:
    """A file of all command lines that another user sees meanwhile."""
    file = folder / "command_lines"
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    with (
        file.open("wb") as output,
        subprocess.Popen([*other, "/usr/bin/env", "python3", "-c", READER], stdout=output) as reader,
    ):
        try:
            yield file
            assert reader.poll() is None
        finally:
            reader.kill()
