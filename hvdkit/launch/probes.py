"""Processes that answer questions on each host (agent/host_probe.py), reached by ssh or srun."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hvdkit.launch.hosts import Host
from hvdkit.launch.launchers.slurm import STEP

START_S, ANSWER_S = 30.0, 15.0  # a busy host answers late; ssh itself gives up earlier where there is none
_PACKAGE = "hvdkit.launch.agent"
_ROOT = Path(__file__).parents[2]
_MODULES = ("hvdkit.handshake", *(f"{_PACKAGE}.{name}" for name in ("interfaces", "link_probe", "host_probe")))
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")
# The first line of standard input is a Python statement, which loads the modules and answers the lines after it.
_LOADER = """\
import sys, types
for name, text in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""
# What ssh says, and what to do about it; {host} is the host.
_SSH_REMEDIES = {
    "Permission denied": "let your key in: `ssh-copy-id {host}`",
    "Could not resolve hostname": "check the name, or give the host's address",
    "Connection refused": "start sshd there: `sudo systemctl start ssh`",
    "timed out": "is the machine on? a firewall may close port 22",
    "No route to host": "is the machine on, and in a network that this one reaches?",
    "verification failed": "log in once by hand and accept its key: `ssh {host}`",
    "not found": "install Python 3 there",
}


class Unreachable(Exception):
    """A host that gives no answer: why, and what to do about it."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


def way(host: Host, allocated: bool) -> str:
    """How a command gets to the host: `srun` (a host of the Slurm allocation), `here` or `ssh`."""
    return "srun" if allocated else "here" if host.here else "ssh"


def _command(host: Host, how: str, pythons: Sequence[str]) -> list[str]:
    """The command line of a probe, under the first of the interpreters that works there."""
    start = shlex.join(["-I", "-S", "-c", "import sys; exec(sys.stdin.readline())"])
    first = f'"$each" -I -S -c "" 2>/dev/null && exec "$each" {start}'
    search = f"for each in {shlex.join([*pythons, 'python3'])}; do {first}; done"
    words = ["sh", "-c", f"{search}; echo python3: not found >&2; exit 127"]
    if how == "ssh":
        return [*_SSH, host.name, shlex.join(words)]
    if how == "srun":
        return ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", *STEP, *words]
    return words


class Probe:
    """The process on one host; a context manager that leaves nothing of it behind."""

    def __init__(self, host: Host, how: str, pythons: Sequence[str]) -> None:
        self.host, self.how, self.token = host, how, secrets.token_hex(8)
        self._pythons = pythons
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None at the end
        self._asking = threading.Lock()  # one question after the other

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Start it. Raises Unreachable where the program that leads there is missing."""
        command = _command(self.host, self.how, self._pythons)
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `__exit__` closes it
        try:
            # A terminal's Ctrl-C reaches only this process, which ends them all.
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=self._errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise Unreachable(f"{command[0]}: {error.strerror}", f"install {command[0]}") from None
        threading.Thread(target=self._read, daemon=True).start()
        modules = [(name, (_ROOT / f"{name.replace('.', '/')}.py").read_text()) for name in _MODULES]
        self._send(f"exec({_LOADER.format(modules=modules)!r})")

    def ask(self, ask: str, seconds: float = ANSWER_S, **question: Any) -> dict[str, Any]:
        """The answer to a question. Raises Unreachable where none comes in that time."""
        with self._asking:
            self._send(json.dumps({"ask": ask, **question}))
            try:
                answer = self._answers.get(timeout=seconds)
            except queue.Empty:
                raise Unreachable("no answer in time", "is the machine overloaded? see `uptime` there") from None
            if answer is None:
                raise self._why()
            return answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(2.0 if error is None else 0.1)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._errors.close()

    def _send(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `ask` finds out
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        """Take in answers, and no other lines, such as a login's greeting."""
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as lines, contextlib.suppress(OSError):
            for line in lines:
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        self._answers.put(answer)
        self._answers.put(None)

    def _why(self) -> Unreachable:
        """Why the process has ended."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read(65536).splitlines() if line.strip()]
        known = [(line, remedy) for line in lines for words, remedy in _SSH_REMEDIES.items() if words in line]
        by_hand = {"ssh": f"ssh {self.host.name} true", "srun": f"srun -w {self.host.name} true"}
        look = f"look with `{by_hand.get(self.how, 'sh -c true')}`"
        line, remedy = known[-1] if known else ((lines or ["it said nothing"])[-1], look)
        return Unreachable(" ".join(line.split())[:200], remedy.format(host=self.host.name))
