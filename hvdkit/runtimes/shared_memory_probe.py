"""Whether two processes here can share memory as Horovod's ranks of one host do: `PYTHON shared_memory_probe.py`.

It prints `works`, or what failed and why. It takes Horovod's way (runtimes/patches): a memfd, whose descriptor goes to
the other process over an abstract Unix socket, and a lock on a byte of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

_TIMEOUT_S = 5


def _other(name: str) -> None:
    """The other process: gets the memory, locks a byte of it and writes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_S)
        client.connect(name)
        _, (descriptor,), _, _ = socket.recv_fds(client, 1, 1)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
    mmap.mmap(descriptor, mmap.PAGESIZE)[0] = 1


def main() -> None:
    """Try it and print what came out."""
    if os.environ.get("HOROVOD_SHARED_MEMORY") == "0":
        print("HOROVOD_SHARED_MEMORY is 0")
        return
    trying = "memfd_create"
    try:
        memory = os.memfd_create("hvdkit-doctor")
        os.ftruncate(memory, mmap.PAGESIZE)
        word = mmap.mmap(memory, mmap.PAGESIZE)
        trying = "an abstract socket between two processes"
        name = f"\0hvdkit-doctor-{os.urandom(8).hex()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_TIMEOUT_S)
            server.bind(name)
            server.listen(1)
            if (other := os.fork()) == 0:
                try:
                    _other(name)
                finally:
                    os._exit(0)
            socket.send_fds(server.accept()[0], [b"1"], [memory])
        os.waitpid(other, 0)
        if word[0] != 1:
            trying = "memory that two processes share"
            raise OSError("the other one could not lock and write it")
    except OSError as error:
        print(f"{trying}: {error.strerror or error}")
        return
    print("works")


if __name__ == "__main__":
    main()
