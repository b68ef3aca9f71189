"""A process that has a framework imported and forks one rank after the other: `python server.py SOCKET SCRIPT`.

It runs under a runtime's interpreter. When it is first asked for a process it makes the imports of SCRIPT, a recipe's,
or command.py's: then it forks command lines.
Each connection of client.py asks for one process: a JSON line with its arguments, environment and folder, together with
its standard streams. The answer is the process's id, then its status as waitpid has it once it has ended. A process
ends when its connection closes, and all end with the server, which ends when its standard input closes.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOM = "HVDKIT_TEST_ROOM"  # a variable of nothing but length


def serve(path: str, script: str) -> None:
    wakeups, wake = os.pipe()
    os.set_blocking(wakeups, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads on
    children: dict[int, socket.socket] = {}  # by process
    imported = False
    while True:
        ready, _, _ = select.select([0, wakeups, listener, *children.values()], [], [])
        if wakeups in ready:
            os.read(wakeups, 4096)
        for pid in list(children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _, status = os.waitpid(pid, 0)
                with children.pop(pid) as asker, contextlib.suppress(OSError):  # it may have ended too
                    asker.sendall(f"{status}\n".encode())
            elif children[pid] in ready:  # it says nothing more, so this is its end
                kill(pid)
        if 0 in ready:
            for pid in children:
                kill(pid)
            return
        if listener in ready:
            asker, _ = listener.accept()
            asked, streams = request(asker)
            if not imported:
                runpy.run_path(script, run_name="imported")
                gc.freeze()  # a collection in a child would copy every page
                imported = True
            pid = os.fork()
            if not pid:
                for each in (asker, listener, *children.values()):
                    each.close()
                become(asked, streams)
            for stream in streams:
                os.close(stream)
            asker.sendall(f"{pid}\n".encode())
            children[pid] = asker


def show_environment() -> None:
    """Write this process's environment where /proc reads it, over the server's; ROOM makes that large enough."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5), counted from the state
    text = b"".join(b"%b=%b\0" % pair for pair in os.environb.items())
    assert len(text) <= end - start, f"{len(text)} bytes of environment, room for {end - start}"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def restore_generators() -> None:
    """As after the imports: Python seeds its generator anew in a child."""
    import numpy

    from hvdkit.worker import startup

    assert startup._seeded
    random.setstate(startup._seeded[0])
    numpy.random.set_state(startup._seeded[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def request(asker: socket.socket) -> tuple[dict[str, Any], array.array[int]]:
    """What the connection asks for, and its standard streams."""
    streams = array.array("i")
    text, ancillary, _, _ = asker.recvmsg(1 << 16, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    while not text.endswith(b"\n"):
        text += asker.recv(1 << 16)
    return json.loads(text), streams


def become(asked: dict[str, Any], streams: array.array[int]) -> NoReturn:
    """In the child: be what was asked for."""
    status = 0
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        show_environment()
        sys.argv = asked["arguments"]
        if Path(sys.argv[0]).parent != Path(__file__).parent:  # no command line
            restore_generators()
        given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:1] = [str(Path(sys.argv[0]).resolve().parent), *given]  # as a new interpreter has it
        for name in ("stdout", "stderr"):  # as PYTHONUNBUFFERED has them; a pipe now, a file before
            before = getattr(sys, name)
            raw = os.fdopen(before.fileno(), "wb", buffering=0, closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, before.encoding, before.errors, write_through=True))
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if Path(sys.argv[2]).parent != Path(__file__).parent:
        from hvdkit.worker import startup

        startup.begin()  # as the scripts do, before the framework
    serve(sys.argv[1], sys.argv[2])
