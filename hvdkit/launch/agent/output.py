"""Lines in a rank's output that the launcher needs to know of: those for the user, and Horovod's about stalls.

All other output is a sign of progress (`OutputReader.printed`), except what Horovod's own threads log.

Lines for the user begin with SAID. Horovod's stall inspector names the collectives that only some ranks entered, and
who is missing. Rank 0 of a process set prints it (horovod/common/stall_inspector.cc), every
HOROVOD_STALL_CHECK_TIME_SECONDS:

    [2026-11-23 18:00:00.123456: W /…/stall_inspector.cc:107] One or more tensors were submitted to be reduced, …
    Missing ranks:
    1: [allreduce.gradients.0, allreduce.gradients.1, ...]

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import re
from typing import Any

SAID = "hvdkit: "  # as in heartbeat.py
VARIABLE = "HOROVOD_STALL_CHECK_TIME_SECONDS"
# A tensor that is in Horovod's response cache is dropped from it first and then timed anew: four checks at most.
CHECKS = 4
_BEGIN = "Missing ranks:"
_RANK = re.compile(r"(?P<rank>\d+)!?: \[(?P<names>.*)\]")
_LOGGED = re.compile(r"\[[^\]]*\.(?:cc|h):\d+\]")
_SAID = re.compile(r"^\[[^\]]*stall_inspector\.cc:\d+\].*\n(Missing ranks:\n(\d+!?: \[.*\]\n?)*)?", re.MULTILINE)
_LONGEST_LINE = 65536  # characters
_MOST_SAID, _LONGEST_SAID = 500, 1000  # lines for the user of one rank, and characters of one


class OutputReader:
    """Finds the inspector's messages in a rank's output, and lines for the user."""

    def __init__(self) -> None:
        self._unfinished = ""
        self._missing: dict[int, list[str]] | None = None  # while a message is read
        self._count = 0  # of lines for the user
        self.printed = 0  # lines, and states of a progress bar, that the program itself has printed

    def events(self, output: bytes) -> list[tuple[str, dict[str, Any]]]:
        """What to report of this output: "said" with the `text` of a line for the user, and "stalled".

        `missing` are then the tensors that each missing rank did not submit, at most six a rank. A message may come in
        parts; what is reported last has all the ranks named so far.
        """
        events: list[tuple[str, dict[str, Any]]] = []
        latest = None
        self.printed += output.count(b"\r")
        *lines, self._unfinished = (self._unfinished + output.decode("utf-8", "replace")).split("\n")
        self._unfinished = self._unfinished[-_LONGEST_LINE:]
        for line in lines:
            match = _RANK.fullmatch(line)
            if line.startswith(SAID) and self._count < _MOST_SAID:
                self._count += 1
                events.append(("said", {"text": line[len(SAID) : _LONGEST_SAID]}))
            if line == _BEGIN:
                self._missing = {}
            elif match is None:
                self._missing = None
                self.printed += not _LOGGED.match(line)
            elif self._missing is not None:
                self._missing[int(match["rank"])] = match["names"].replace(" ...", "").split(", ")
                latest = dict(self._missing)
        return events if latest is None else [("stalled", {"missing": latest}), *events]


def is_logged(line: str) -> bool:
    """Whether a line is of Horovod's own log, or of the inspector's messages."""
    return line == _BEGIN or bool(_LOGGED.match(line) or _RANK.fullmatch(line))


def without(text: str) -> str:
    """A rank's output without the inspector's whole messages, which hide what the rank printed before it waited."""
    return _SAID.sub("", text)
