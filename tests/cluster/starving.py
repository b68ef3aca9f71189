"""Slow networks for tests, whose links fail when a test says so, or a word on why this machine can have none."""

from __future__ import annotations

import json
import subprocess
from functools import cache

import pytest

from hvdkit.launch.namespaces import Network, Unavailable


class FailingNetwork(Network):
    """A network whose links go down and come back."""

    def cut(self, host: str) -> None:
        """Take the host's link down."""
        self.run(["ip", "link", "set", "eth0", "down"], host, check=True)

    def mend(self, host: str) -> None:
        """Bring the host's link up again."""
        self.run(["ip", "link", "set", "eth0", "up"], host, check=True)

    def swallow(self, host: str) -> None:
        """Let the host's packets vanish in the switch, with no sign of it at the link."""
        self.run(["ip", "link", "set", f"to-{host}", "nomaster"], check=True)

    def sent_packets(self, host: str) -> int:
        """How many packets a host has sent so far."""
        shown = self.run(["ip", "-json", "-stats", "link", "show", "eth0"], host, check=True, stdout=subprocess.PIPE)
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["packets"])


@cache
def _why_not() -> str | None:
    try:
        with Network(1, 100.0):
            return None
    except Unavailable as error:
        return str(error)


def network(count: int, mbit_per_s: float, control: bool = True) -> FailingNetwork:
    """A network, to be entered. Skips, saying why, on a machine that allows no network namespaces."""
    reason = _why_not()
    if reason:
        pytest.skip(f"needs network namespaces: {reason}")
    return FailingNetwork(count, mbit_per_s, control)
