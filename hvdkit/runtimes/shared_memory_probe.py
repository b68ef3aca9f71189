"""Whether two processes here can share memory as Horovod's ranks of one host do: `PYTHON shared_memory_probe.py`.

It prints `works`, or what failed and why. It takes Horovod's way (runtimes/patches): a memfd, whose descriptor goes to
the other process over an abstract Unix socket; a lock on a byte of it, and a futex to wait for each other.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import socket
import sys
import time

_TIMEOUT_S = 5
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # the number of the system call
_WAIT, _WAKE = 0, 1


def _futex(word: ctypes.c_uint32, operation: int, value: int) -> None:
    """Call futex(2), which waits a millisecond at most: a wake-up may come before it."""
    if _FUTEX is None:
        return
    library = ctypes.CDLL(None, use_errno=True)
    at_most = (ctypes.c_long * 2)(0, 10**6)
    done = library.syscall(_FUTEX, ctypes.byref(word), operation, value, at_most, None, 0)
    if done < 0 and ctypes.get_errno() not in (11, 110):  # EAGAIN: it has changed; ETIMEDOUT
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _word(descriptor: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_buffer(mmap.mmap(descriptor, mmap.PAGESIZE))


def _other(name: str) -> None:
    """The other process: gets the memory, locks a byte of it, writes and wakes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_S)
        client.connect(name)
        _, (descriptor,), _, _ = socket.recv_fds(client, 1, 1)
    word = _word(descriptor)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
    word.value = 1
    _futex(word, _WAKE, 1)


def main() -> int:
    """Try it and print what came out; returns the exit status."""
    if os.environ.get("HOROVOD_SHARED_MEMORY") == "0":
        print("HOROVOD_SHARED_MEMORY is 0")
        return 0
    trying = "memfd_create"
    try:
        memory = os.memfd_create("hvdkit-doctor")
        os.ftruncate(memory, mmap.PAGESIZE)
        word = _word(memory)
        trying = "an abstract socket between two processes"
        name = f"\0hvdkit-doctor-{os.urandom(8).hex()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_TIMEOUT_S)
            server.bind(name)
            server.listen(1)
            if os.fork() == 0:
                try:
                    _other(name)
                    os._exit(0)
                finally:
                    os._exit(1)
            socket.send_fds(server.accept()[0], [b"1"], [memory])
        trying = "a futex in memory that two processes share"
        until = time.monotonic() + _TIMEOUT_S
        while word.value == 0 and time.monotonic() < until:
            _futex(word, _WAIT, 0)
        if word.value == 0:
            raise TimeoutError(110, f"nothing within {_TIMEOUT_S} s")
    except OSError as error:
        print(f"{trying}: {error.strerror or error}")
        return 0
    print("works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
