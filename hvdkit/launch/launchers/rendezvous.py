"""Horovod's own rendezvous, served until standard input closes. Runs under a runtime's interpreter.

usage: python rendezvous.py ADDRESS HOSTS NP      (HOSTS as in horovodrun -H: a:2,b:2)

Prints the port that the kernel chose, so no port can be taken. A launcher that dies, even by SIGKILL, closes its end
of standard input and so ends this process too. Only horovod.runner is imported: no framework, about 0.1 s.
"""

import os
import sys
import threading

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer


def main() -> None:
    """Serve the ranks that the command line describes."""
    address, hosts, np = sys.argv[1:]
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, False)
    server.init(get_host_assignments(parse_hosts(hosts), int(np)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # without waiting for a handler that still waits for a dead rank's bytes


if __name__ == "__main__":
    main()
