"""Whether a rank makes progress. Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.

A rank that runs hvdkit's core writes `rank-<r>.beat` (count, step, phase) whenever it begins something new, and prints
its stacks to `rank-<r>.stack` on SIGUSR2 (hvdkit/heartbeat.py). A rank that has written nothing is not watched.

A program that knows nothing of hvdkit has no heartbeat (`ProgramWatch`). What it prints and reads from or writes to the
disk is progress, and so is the processor time of all its processes. The launcher decides what comes of it
(diagnosis/quiet.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from hvdkit.launch.agent.output import OutputReader
from hvdkit.launch.agent.process_tree import descendants, stat

# A rank that computes without a heartbeat (a first step that compiles, say) hangs only after so many timeouts.
BUSY_FACTOR = 10
BUSY_SHARE = 0.2  # of a core; Horovod's own thread takes a few hundredths, a rank on a crowded machine gets no more
STACK_WAIT_S, STACK_LOOK_S = 0.3, 0.02
FRAMES = 12
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
_DISK = re.compile(r"^(?:read|write)_bytes: (\d+)", re.MULTILINE)
_WAITS = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_FEW_WAKES = 3  # such as by a signal
PROGRAM = "program"  # the phase of one that has no heartbeat
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Watchdog:
    """Watches the process `pid`, by its files of heartbeats and stacks.

    `timeout_s` seconds without a heartbeat are a hang; 0 turns the watchdog off.
    """

    def __init__(self, beat: Path, stack: Path, pid: int, timeout_s: float) -> None:
        # Kept open, so that it can be read where somebody has removed it.
        self._beat_file = -1
        with contextlib.suppress(OSError):
            self._beat_file = os.open(beat, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._stack_path, self._pid, self._timeout_s = stack, pid, timeout_s
        # The last heartbeat, since when, and how much CPU time the process had taken by then.
        self._last_beat, self._since, self._cpu_then_s = b"", time.monotonic(), 0.0
        self._reported = False

    @property
    def interval_s(self) -> float:
        """How often to look; 0 for never."""
        return max(0.1, min(1.0, self._timeout_s / 20)) if self._timeout_s > 0 else 0.0

    def look(self) -> tuple[str, dict[str, Any]] | None:
        """Look now. Returns "hung" and its facts, once for each hang; "resumed" at progress after one; else None.

        The facts are `step` (None before the first) and `phase` of the last heartbeat, `seconds` since then, whether a
        signal has `frozen` the process, and the main thread's `frames`, innermost first.
        """
        try:
            beat = self._beat()
            state, cpu_s = self._process()
        except (OSError, ValueError, IndexError):
            return None
        now = time.monotonic()
        if beat != self._last_beat:
            resumed = self._reported
            self._last_beat, self._since, self._cpu_then_s, self._reported = beat, now, cpu_s, False
            return ("resumed", {}) if resumed else None
        still_s = now - self._since
        busy = cpu_s - self._cpu_then_s > BUSY_SHARE * still_s
        if self._reported or still_s < self._timeout_s * (BUSY_FACTOR if busy else 1):
            return None
        self._reported = True
        return "hung", {"seconds": still_s, **self._activity(beat, state)}

    def activity(self) -> dict[str, Any] | None:
        """`step`, `phase`, `frozen` and `frames` now; None for a rank that writes no heartbeat, or has ended."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return self._activity(self._beat(), self._process()[0])
        return None

    def _beat(self) -> bytes:
        """The last heartbeat. Raises OSError or ValueError where there is none."""
        beat = os.pread(self._beat_file, 4096, 0)
        if not beat:
            raise ValueError("no heartbeat yet")
        return beat

    @property
    def done(self) -> bool:
        """Whether the rank has said that its work is done (`DONE` of hvdkit/heartbeat.py).

        Believed where the file could not be made.
        """
        with contextlib.suppress(ValueError):
            return self._beat_file < 0 or self._beat().split()[2:3] == [b"done"]
        return False

    def _activity(self, beat: bytes, state: str) -> dict[str, Any]:
        facts: dict[str, Any] = {"step": None, "phase": None}
        with contextlib.suppress(ValueError):
            _, step, phase = beat.decode().split(" ", 2)
            facts = {"step": int(step) if int(step) >= 0 else None, "phase": phase.strip()}
        return {**facts, "frozen": state == "T", "frames": self._frames(state)}

    def frozen(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger holds the process."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return stat(self._answering)[0] in "Tt"
        return False

    def _process(self) -> tuple[str, float]:
        """State letter and CPU seconds so far, from /proc/PID/stat."""
        fields = stat(self._pid)
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    @property
    def _answering(self) -> int:
        """The process that prints its stacks on SIGUSR2, if it catches that."""
        return self._pid

    def _frames(self, state: str) -> list[str]:
        """What the main thread executes, innermost first: `name (file:line)`; empty where it cannot answer."""
        text = ""
        with contextlib.suppress(OSError):
            pid = self._answering
            if state not in "TtZX" and _catches(pid, signal.SIGUSR2):
                start = self._stack_path.stat().st_size  # only what is printed from here on is of this hang
                os.kill(pid, signal.SIGUSR2)
                enough, before = time.monotonic() + STACK_WAIT_S, ""
                while time.monotonic() < enough and not (text and text == before):  # until no more comes
                    time.sleep(STACK_LOOK_S)
                    before, text = text, self._stack_path.read_text(errors="replace")[start:]
        main_thread = re.split(r"^(?:Current t|T)hread ", text, flags=re.MULTILINE)[-1]
        frames = [f"{m['name']} ({m['file']}:{m['line']})" for m in _FRAME.finditer(main_thread)]
        return frames[:FRAMES]


class ProgramWatch(Watchdog):
    """Watches a program without heartbeats, with all its processes. `reader` counts what it prints."""

    def __init__(self, beat: Path, stack: Path, pid: int, timeout_s: float, reader: OutputReader) -> None:
        super().__init__(beat, stack, pid, timeout_s)
        self._reader = reader
        self._quiet_since = self._idle_since = self._sampled_at = time.monotonic()
        self._seen: tuple[int, ...] = ()
        self._cpu_s, self._wakes = 0.0, 0
        self._told: bool | None = None  # what was reported last: whether it computes; None for nothing

    def look(self) -> tuple[str, dict[str, Any]] | None:
        """As the base: "hung" once it is quiet for `timeout_s`, and again where it begins or ceases to compute.

        The facts have `busy` too, whether its processes compute, and `blocked`, whether its main thread has not woken
        up since: one that only waits for a GPU does, once for each step.
        """
        now = time.monotonic()
        if now < self._sampled_at + self._timeout_s / 8 and self._reader.printed == (self._seen or (0,))[0]:
            return None
        pids = [self._pid, *descendants(self._pid)]
        seen = self._reader.printed, sum(map(_disk_bytes, pids))
        cpu_s = sum(map(_cpu_s, pids))
        busy = cpu_s - self._cpu_s > BUSY_SHARE * (now - self._sampled_at) or self._wants(pids)
        self._cpu_s, self._sampled_at = cpu_s, now
        if seen != self._seen:
            self._seen, self._quiet_since = seen, now
        wakes = _wakes(self._answering)
        if busy or now == self._quiet_since:
            self._idle_since, self._wakes = now, wakes
        idle = now - self._idle_since >= self._timeout_s
        if now - self._quiet_since < self._timeout_s:
            resumed, self._told = self._told is not None, None
            return ("resumed", {}) if resumed else None
        if self._told == (not idle) or (not idle and not busy):
            return None
        self._told = not idle
        seconds = now - (self._idle_since if idle else self._quiet_since)
        blocked = idle and wakes - self._wakes <= _FEW_WAKES
        activity = self.activity()
        self._seen = seen[0], sum(map(_disk_bytes, pids))  # it has written its stack
        return (
            None
            if activity is None
            else ("hung", {"seconds": seconds, "busy": not idle, "blocked": blocked, **activity})
        )

    def activity(self) -> dict[str, Any] | None:
        """As the base, in the phase PROGRAM."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            state = stat(self._answering)[0]
            return {"step": None, "phase": PROGRAM, "frozen": state == "T", "frames": self._frames(state)}
        return None

    def _wants(self, pids: list[int]) -> bool:
        """Whether its main thread wants a core that others have, or a thread of its processes `pids` a disk.

        One that waits for something else is seldom seen so twice.
        """
        for _ in range(2):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if stat(self._answering)[0] != "R" and not any(map(_waits_for_a_disk, pids)):
                    return False
            time.sleep(STACK_LOOK_S)
        return True

    @property
    def done(self) -> bool:
        """A program does not say so."""
        return True

    @property
    def _answering(self) -> int:
        """The Python process that has begun the stack file, by its first line (startup/sitecustomize.py)."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(self._stack_path.read_text(errors="replace").split(maxsplit=2)[1])
        return self._pid


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of the signal, which would end it otherwise. Raises OSError."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _cpu_s(pid: int) -> float:
    """Processor time of a process and of its children that have ended, in seconds; 0 where it has ended itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return sum(map(int, stat(pid)[11:15])) / _TICKS_PER_S
    return 0.0


def _wakes(pid: int) -> int:
    """How often the main thread of a process has waited for something; 0 where it has ended."""
    with contextlib.suppress(OSError, AttributeError):
        return int(_WAITS.search(Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
    return 0


def _waits_for_a_disk(pid: int) -> bool:
    """Whether the kernel holds a thread of the process, as in a write or fsync that lasts."""
    with contextlib.suppress(OSError, ValueError):
        return any(stat(f"{pid}/task/{thread.name}")[0] == "D" for thread in Path(f"/proc/{pid}/task").iterdir())
    return False


def _disk_bytes(pid: int) -> int:
    """What a process has read from and written to disks; 0 where that cannot be read."""
    with contextlib.suppress(OSError):
        return sum(map(int, _DISK.findall(Path(f"/proc/{pid}/io").read_text())))
    return 0
