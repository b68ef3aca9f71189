"""Horovod's own rendezvous, served until standard input closes. Runs under a runtime's interpreter.

usage: python rendezvous.py SOCKET HOSTS NP      (HOSTS as in horovodrun -H: a:2,b:2)

SOCKET is the descriptor of the launcher's listening socket. Prints a line once it serves. Until then it loads Horovod;
ranks can start meanwhile, as the kernel keeps their connections. A launcher that dies, even by SIGKILL, closes its end
of standard input and so ends this process too. Only horovod.runner is imported: no framework, about 0.1 s.
"""

import os
import socket
import sys
import threading

# The folder of a script comes first in sys.path: its files would hide what Horovod imports.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

descriptor, hosts, np = sys.argv[1:]

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer


class Server(RendezvousHTTPServer):
    """Horovod's server at the launcher's socket."""

    def server_bind(self) -> None:
        self.server_close()  # the socket that it has made itself
        self.socket = socket.socket(fileno=int(descriptor))
        self.server_name, self.server_port = self.server_address = self.socket.getsockname()


def main() -> None:
    """Serve the ranks that the command line describes."""
    server = Server(("", 0), RendezvousHandler, False)
    server.init(get_host_assignments(parse_hosts(hosts), int(np)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("serving", flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # without waiting for a handler that still waits for a dead rank's bytes


if __name__ == "__main__":
    main()
