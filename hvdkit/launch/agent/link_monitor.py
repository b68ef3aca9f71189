"""Whether a host still reaches the others, and the launcher's machine.

Two signs of the others are used: the interface of the ranks is down or has lost its carrier; or another host has not
acknowledged several retransmissions, as where packets are lost on the way or the machine is dead. A process that is
dead or frozen gives neither sign: its kernel still acknowledges.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.launch.agent.interfaces import SIOCGIFFLAGS, address_of, ask

LOOK_S = 1.0
DOWN_S = 5.0  # a link that comes back sooner is no fault: TCP sends again
RETRANSMISSIONS = 4  # without an answer; Linux takes 3 s for so many on a near network
RECENT_S = 5.0  # the connections of a rank that gives up on a host are closed with it
ASK_S, ANSWER_S, LOST_S = 10.0, 2.0, 60.0  # of the launcher
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_ESTABLISHED, _RETRANSMITS = 1, 1  # of /proc/net/tcp: state, kind of timer


class LinkMonitor:
    """Watches the interface of that name; without a name, or for the loopback, nothing."""

    def __init__(self, interface: str | None) -> None:
        self._interface = "" if interface in (None, "lo") else str(interface)
        self._down_since: float | None = None
        self._reported = False
        self._unanswered: dict[str, float] = {}  # by address, when it was last seen
        self._address = address_of(self._interface) if self._interface else None

    @property
    def interval_s(self) -> float:
        """How often to look; 0 for never."""
        return LOOK_S if self._interface else 0.0

    def look(self) -> tuple[str, dict[str, Any]] | None:
        """Look now. Returns "link down" once, when the link has been down for DOWN_S seconds, with `interface` and
        whether it is `up` (then it has no carrier); else None."""
        self._note_unanswered()
        flags, now = self._flags(), time.monotonic()
        if flags is None or (flags & _IFF_UP and flags & _IFF_RUNNING):
            self._down_since = None
            return None
        self._down_since = self._down_since or now
        if self._reported or now < self._down_since + DOWN_S:
            return None
        self._reported = True
        return "link down", {"interface": self._interface, "up": bool(flags & _IFF_UP)}

    def facts(self) -> dict[str, Any]:
        """This host's `address` (None where unknown), and the addresses that do not answer (`unanswered`)."""
        self._note_unanswered()
        recent = time.monotonic() - RECENT_S
        return {"address": self._address, "unanswered": sorted(a for a, t in self._unanswered.items() if t > recent)}

    def _note_unanswered(self) -> None:
        """Note which addresses do not answer now."""
        if not self._interface:
            return
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                state, timer, retransmits = int(fields[3], 16), int(fields[5].partition(":")[0]), int(fields[6], 16)
                if state == _ESTABLISHED and timer == _RETRANSMITS and retransmits >= RETRANSMISSIONS:
                    # Hexadecimal, in the machine's own byte order.
                    address = socket.inet_ntoa(struct.pack("=I", int(fields[2].partition(":")[0], 16)))
                    self._unanswered[address] = time.monotonic()

    def _flags(self) -> int | None:
        answer = ask(self._interface, SIOCGIFFLAGS) if self._interface else None
        return None if answer is None else int(struct.unpack_from("=H", answer, 16)[0])


class LauncherWatch:
    """Whether the launcher's machine still answers, for the agent of a rank that horovodrun has started.

    Such an agent has no connection to it, but a pipe to sshd, which may take hours to notice that the machine is lost.
    The port of Horovod's rendezvous is there as long as horovodrun. Its address is in the `environment`, which is empty
    for agents of other roles: those watch nothing.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        self._port = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        self._ask_at = 0.0
        self._heard_at: float | None = None

    @property
    def interval_s(self) -> float:
        """How often to look; 0 for never."""
        return ASK_S if self._address and self._port else 0.0

    def look(self) -> tuple[str, dict[str, Any]] | None:
        """Ask if it is time to. Returns "launcher lost" once it has answered, and then not for LOST_S seconds."""
        now = time.monotonic()
        if now < self._ask_at or not (self._address and self._port):
            return None
        self._ask_at = now + ASK_S
        try:
            socket.create_connection((self._address, int(self._port)), ANSWER_S).close()
            self._heard_at = now
        except OSError:
            if self._heard_at is not None and now > self._heard_at + LOST_S:
                return "launcher lost", {}
        return None
