"""Where agents report over TCP, if a program of the cluster has started them."""

from __future__ import annotations

import secrets
import socket
from typing import Any, Self

_BACKLOG = 1024  # all ranks connect at once


class Listener:
    """A port on all of this machine's addresses. A connection counts once its first line is `secret`."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("0.0.0.0", 0), backlog=_BACKLOG)
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self.secret = secrets.token_hex(16)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()
