"""Start one command, report how it ended, and leave no process of it behind.

usage: python -I -S rank_agent.py ROLE FOLDER GRACE_S HANG_S COMMAND...

Every rank has an agent as its parent, on the host where the rank runs. The agent
- writes the command's output to FOLDER/rank-<r>.log (worker-<place>.log under an elastic launcher);
- reports on its standard output, which leads to the launcher (`MARK` + JSON, one line each), that the rank has started,
  how it ended, with the record that it may have left in FOLDER/rank-<r>.failure.json, and that no process is left;
- reports too when the rank has made no progress for HANG_S seconds (watchdog.py; 0: never) and when it continues, that
  its host's network interface is down (link_monitor.py), or which ranks did not join a collective (output.py);
- reports a rank that ends with status 0 before it has said that its work is done, and ends with status 1 itself;
- ends the rank on SIGTERM, as soon as nobody reads its standard output any more (the launcher was killed, the ssh
  connection broke), and where the launcher's machine is lost (link_monitor.py): SIGTERM to its process group, SIGKILL
  after GRACE_S seconds, at once when asked again;
- gives the rank a folder of its own for temporary files and removes it: a rank that is killed leaves its files behind,
  TensorFlow's alone are dozens for each rank;
- kills whatever the rank leaves behind. An agent is a "subreaper": descendants whose parent died become its children
  instead of init's, so a daemonized grandchild cannot escape.

A parent-death signal alone would not do: it covers no grandchild, gives no grace and does not cross ssh. The agent uses
it for one case, its own death by SIGKILL.

ROLE is
- `rank`;
- `shell-rank` for a rank that horovodrun starts. horovodrun ends all ranks as soon as one has failed, which may be one
  that only lost another: so the agent of a failed rank stays until the launcher ends all ranks, or is lost;
- `task` for a rank that a program of the cluster starts, such as srun or mpirun (task.py). It reports over a
  connection, which the launcher half-closes to end the rank. The agent of a failed rank stays for the same reason;
- any other: the name of a program that starts ranks, such as horovodrun. Its output may carry the reports of the ranks'
  agents, which go on to the launcher; the rest goes to FOLDER/<name>.log.

Standard library only, and no syntax newer than Python 3.8: it runs under any interpreter that has the framework.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:
    # -I leaves hvdkit out of sys.path; at the end of it no module of the standard library is hidden.
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from hvdkit.launch.agent.link_monitor import LauncherWatch, LinkMonitor
from hvdkit.launch.agent.output import OutputReader
from hvdkit.launch.agent.process_tree import descendants, kill, oom_kills, remove_segments
from hvdkit.launch.agent.reports import MARK, PROGRAM_RUNS, REPORTS_DONE, SHARED, Reports, read_failure, write_line
from hvdkit.launch.agent.scratch import Scratch
from hvdkit.launch.agent.shell_rank import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, exit_status, prctl, step_aside
from hvdkit.launch.agent.watchdog import ProgramWatch, Watchdog

TAIL_BYTES = 8192
SEEN_S = 3.0  # for a network file system to show a new file
AFTERMATH_S = 0.5  # for helpers that clean up once their rank is gone, such as multiprocessing's resource tracker


def main() -> int:
    """Run the command of this command line; the exit status is the command's, 128 + n for signal n."""
    role, folder, grace_s, hang_s, *command = sys.argv[1:]
    if role == "task":
        from hvdkit.launch.agent.task import NotARank, become_rank

        try:
            become_rank()
        except NotARank as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    reports = Reports(role)
    if role == "shell-rank":
        status = step_aside(reports)
        if status is not None:
            return status
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    agent = RankAgent(role, reports, Path(folder), float(grace_s), float(hang_s))
    status = agent.run(command)
    if role != "rank" and reports.rank is not None and status != 0 and os.environ.get("HOROVOD_ELASTIC") != "1":
        agent.wait_for_stop()
    return status


class RankAgent:
    """One command from its start to its end: a rank, or a program that starts ranks."""

    def __init__(self, role: str, reports: Reports, folder: Path, grace_s: float, hang_s: float) -> None:
        self.reports, self.folder = reports, folder
        self.is_rank = reports.rank is not None
        self.grace_s, self.hang_s = grace_s, hang_s if self.is_rank else 0.0
        self.log_path, self.failure_path, self.beat_path, self.stack_path = (
            folder / f"{reports.name}.{kind}" for kind in ("log", "failure.json", "beat", "stack")
        )
        self.log = -1
        self.log_error: str | None = None
        self.tail = b""
        self.unfinished_line = b""
        self.child = 0
        self.stop_requests = 0
        self.outside = False  # a signal asked to stop, and not the launcher, which would half-close the connection
        self.stopped_at: float | None = None
        self.kill_at: float | None = None
        self.look_at = 0.0
        self.link = LinkMonitor(os.environ.get("HOROVOD_GLOO_IFACE") if self.is_rank else None)
        self.launcher = LauncherWatch(os.environ if role == "shell-rank" else {})
        self.reader = OutputReader()
        self.when_stopped: dict[str, Any] = {"frozen": False, "activity": None}  # of the rank
        self.connected = stat.S_ISSOCK(os.fstat(1).st_mode)  # to the launcher

    def run(self, command: list[str]) -> int:
        """Start `command`, wait for its end, report both; returns its exit status, 127 where it cannot be started."""
        self._catch_signals()
        self.started_at, self.oom_kills = time.monotonic(), oom_kills()
        if not self._sees_folder():
            return 2
        self._open_log()
        self.scratch = Scratch(self.reports.name if self.is_rank else None)
        try:
            process = self._start(command)
        except OSError as error:
            self.scratch.remove()
            self._keep(f"{command[0]}: cannot be started: {error.strerror}\n".encode())
            self.reports.send("ended", **self._how_it_ended(127 << 8, time.monotonic()))
            return 127
        self.child = process.pid
        files = self.beat_path, self.stack_path, self.child, self.hang_s
        self.watchdog = ProgramWatch(*files, self.reader) if os.environ.get(PROGRAM_RUNS) else Watchdog(*files)
        self.watchers = [watcher for watcher in (self.watchdog, self.link, self.launcher) if watcher.interval_s]
        self.reports.send("started", pid=self.child)
        self.scratch.remove_those_of_the_dead()
        status, ended_at = self._wait()
        process.returncode = exit_status(status)  # reaped here, not by Popen
        self._read_output()
        self.reports.send("ended", **self._how_it_ended(status, ended_at))
        self._end_descendants()
        self._read_output()
        # A rank ended while it wrote its record (files.write_atomic) leaves the temporary file.
        for leftover in (*self.folder.glob(f".{self.failure_path.name}.*"), self.beat_path, self.stack_path):
            with contextlib.suppress(OSError):  # gone, or the disk has become read-only
                leftover.unlink()
        self.scratch.remove()
        self.reports.send("left")
        return exit_status(status) or int(self._left_early(status))

    def _sees_folder(self) -> bool:
        """Whether this host sees the launcher's folder, by a file in it. Reports the rank's end where it does not."""
        mark = os.environ.pop(SHARED, "") if self.is_rank else ""
        while mark and not Path(mark).exists():
            if time.monotonic() > self.started_at + SEEN_S:
                message = (
                    f"{self.folder} on {socket.gethostname()}: not the launcher's folder; give --out a folder that all "
                    "hosts share"
                )
                record = {"clock": self.started_at, "step": None, "kind": "request", "message": message}
                self.reports.send("ended", **{**self._how_it_ended(2 << 8, time.monotonic()), "failure": record})
                return False
            time.sleep(0.05)
        return True

    def wait_for_stop(self) -> None:
        """Wait until the launcher ends all ranks, or is gone."""
        poller = select.poll()
        poller.register(self.wakeups, select.POLLIN)
        poller.register(1, select.POLLRDHUP)
        look_ms = 1000 * self.launcher.interval_s or None
        while self.stopped_at is None and not self.stop_requests:
            if any(descriptor == 1 for descriptor, _ in poller.poll(look_ms)) or self.launcher.look():
                return
            self._awake()

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeups, 4096)

    def _catch_signals(self) -> None:
        """From here on signals only wake `_wait`, which handles them one after the other."""
        self.wakeups, wake = os.pipe()
        os.set_blocking(self.wakeups, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop_signal)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start the command; its output goes to `self.output`."""
        agent = os.getpid()

        def die_with_agent() -> None:
            # The signal comes with the end of the thread that forked: the agent has only one.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:
                os._exit(1)

        added = {} if self.scratch.path is None else {"TMPDIR": str(self.scratch.path)}
        if self.is_rank and os.environ.get(PROGRAM_RUNS) and "OMP_NUM_THREADS" not in os.environ:
            ranks_here = int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
            added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks_here))
        self.output, theirs = os.pipe()
        os.set_blocking(self.output, False)
        try:
            # A session of its own: a terminal's Ctrl-C reaches only the launcher, which ends all ranks.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=subprocess.STDOUT,
                env={**os.environ, **added, "HVDKIT_TRACE": self.reports.name},
                start_new_session=True,
                preexec_fn=die_with_agent,
            )
        finally:
            os.close(theirs)

    def _wait(self) -> tuple[int, float]:
        """Copy output and handle signals until the command ends; returns its waitpid status and when it came."""
        poller = select.poll()
        poller.register(self.wakeups, select.POLLIN)
        poller.register(self.output, select.POLLIN)
        # The reader is gone, or has half-closed the connection; or, over a connection, it says something.
        poller.register(1, select.POLLRDHUP | (select.POLLIN if self.connected else 0))
        while True:
            ready = dict(poller.poll(self._timeout_ms()))
            now = time.monotonic()
            if self.wakeups in ready:
                self._awake()
            status = self._reap()
            if status is not None:
                return status, now
            if ready.get(1, 0) & ~select.POLLIN:
                poller.unregister(1)
                self.stop_requests += 1
                self.outside &= self.stopped_at is not None
            elif 1 in ready:  # the launcher sends the name of the file that asks ranks to write a checkpoint and end
                with contextlib.suppress(OSError):
                    name = os.read(1, 4096).decode("ascii", "replace").strip()
                    if name.isalpha():
                        (self.folder / name).touch()
            self._stop_as_asked()
            if self.output in ready and self._read_output():
                poller.unregister(self.output)
            if self.watchers and self.stopped_at is None and now >= self.look_at:
                self.look_at = now + min(watcher.interval_s for watcher in self.watchers)
                for event, facts in filter(None, [watcher.look() for watcher in self.watchers]):
                    if event == "launcher lost":
                        self.stop_requests += 1
                    else:
                        self.reports.send(event, **facts)

    def _timeout_ms(self) -> float | None:
        """How long to wait for events before the next thing to do by the clock."""
        due = self.kill_at if self.stopped_at is not None else self.look_at if self.watchers else None
        return None if due is None else max(0.0, due - time.monotonic()) * 1000

    def _on_stop_signal(self, *_: object) -> None:
        self.stop_requests += 1
        self.outside |= self.connected and self.stopped_at is None

    def _stop_as_asked(self) -> None:
        """End the command as far as was asked: first by SIGTERM; asked again or after the grace, by SIGKILL."""
        if self.stop_requests and self.stopped_at is None:
            self.stopped_at = time.monotonic()
            self.when_stopped = {"frozen": self.watchdog.frozen(), "activity": self.watchdog.activity()}
            self.stop_requests -= 1
            self.kill_at = self.stopped_at + self.grace_s
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child, signal.SIGTERM)
                os.killpg(self.child, signal.SIGCONT)  # else a frozen rank would not get it
        overdue = self.kill_at is not None and time.monotonic() >= self.kill_at
        if self.stopped_at is not None and (self.stop_requests or overdue):
            self.kill_at = None
            self.stop_requests = 0
            kill(descendants(os.getpid()), spare_trackers=True)

    def _reap(self) -> int | None:
        """Collect ended children, adopted ones too; the command's waitpid status once it is among them."""
        ended = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.child:
                    ended = status
        return ended

    def _end_descendants(self) -> None:
        """Give what the command left behind a moment to end by itself, then kill it, until nothing is left."""
        patience, below = time.monotonic() + AFTERMATH_S, {self.child}
        while (now := time.monotonic()) < patience + 2.0:
            self._reap()
            left = descendants(os.getpid())
            below.update(left)
            if not left:
                break
            if now >= patience:  # trackers remove what the others leave, and end after them
                kill(left, spare_trackers=now < patience + 1.0)
            self._read_output()
            time.sleep(0.01)
        remove_segments(below)

    def _how_it_ended(self, status: int, ended_at: float) -> dict[str, object]:
        """The facts of the end, as reported. Times are in seconds of this machine's monotonic clock."""
        failure = read_failure(self.failure_path)
        failed_at = ended_at if failure is None else min(ended_at, max(self.started_at, failure["clock"]))
        by_signal = os.WIFSIGNALED(status)
        return {
            "exit_code": None if by_signal else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if by_signal else None,
            "out_of_memory": None if self.oom_kills is None else (oom_kills() or 0) > self.oom_kills,
            "left_early": self._left_early(status),
            "stopped": self.stopped_at is not None,
            "outside": self.outside,
            **self.when_stopped,
            "after_stop": self.stopped_at is not None and failed_at > self.stopped_at,
            "seconds": ended_at - self.started_at,
            "failed_at": failed_at,
            "failure": failure,
            "tail": self.tail.decode("utf-8", "replace"),
            "log_error": self.log_error,
            **self.link.facts(),
        }

    def _left_early(self, status: int) -> bool:
        """Whether the command has ended with status 0, and should have said before that its work is done."""
        return status == 0 and self.is_rank and bool(os.environ.get(REPORTS_DONE)) and not self.watchdog.done

    def _open_log(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (self.failure_path, self.beat_path, self.stack_path):
                old.unlink(missing_ok=True)
            self.log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            self.log_error = error.strerror

    def _read_output(self) -> bool:
        """Read what the command has printed so far; True at the end of its output."""
        while True:
            try:
                data = os.read(self.output, 65536)
            except BlockingIOError:
                return False
            if not data:
                return True
            if not self.is_rank:
                data = self._pass_on_reports(data)
            for event, facts in self.reader.events(data) if self.is_rank else ():
                self.reports.send(event, **facts)
            self._keep(data)

    def _pass_on_reports(self, data: bytes) -> bytes:
        """Send the reports of the ranks' agents to the launcher; returns the other whole lines."""
        *lines, self.unfinished_line = (self.unfinished_line + data).split(b"\n")
        others = []
        for line in lines:
            _, mark, text = line.partition(MARK.encode())
            if mark:
                write_line(mark + text)
            else:
                others.append(line + b"\n")
        return b"".join(others)

    def _keep(self, data: bytes) -> None:
        """Add to the log and to the tail. A full disk ends the log, not the training."""
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        try:
            while data and self.log_error is None:
                data = data[os.write(self.log, data) :]
        except OSError as error:
            self.log_error = error.strerror


if __name__ == "__main__":
    sys.exit(main())
