"""The trackers of a command's runs, each served by a process of its own (`hvdkit/tracking/client.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hvdkit.errors import Faults, RequestError, Stopped, nearest
from hvdkit.handlers.tensorboard import scalars
from hvdkit.launch.diagnosis.exits import Terminated
from hvdkit.results.train import MetricLine, TrainResult, read_metrics, read_result

TENSORBOARD = "tensorboard"  # written by rank 0, as the recipe's key says
LIBRARIES = ("wandb", "mlflow")
NAMES = (*LIBRARIES, TENSORBOARD)
FOLDER = "tracking"  # within a run's folder
OPEN_S = 120.0  # for a tracker to load, and to answer
# Until a run is logged completely. After an interrupt whoever sent it waits.
END_S, KILLED_S = 60.0, 5.0
# What is shown of a finished run, by the keys of result.json.
_SUMMARY = (
    "images_per_second", "step_ms_p50", "step_ms_p90", "step_ms_p99", "train_loss", "val_accuracy", "val_loss",
    "peak_rss_mib", "train_s", "startup_s", "cpu_s_per_image", "bytes_per_step",
    "tokens_per_second", "model_flop_per_second",
)  # fmt: skip


def check(names: Iterable[str]) -> list[str]:
    """The trackers of `--log`, each once. Raises RequestError for one that is unknown, or has no library here."""
    faults, chosen = Faults(), list(dict.fromkeys(names))
    for name in chosen:
        if name not in NAMES:
            faults.append(f"--log {name}: expected one of {', '.join(NAMES)}{nearest(name, NAMES)}")
        elif name in LIBRARIES and not _installed(name):
            command = shlex.join([sys.executable, "-m", "pip", "install", f"hvdkit[{name}]"])
            faults.append(f"--log {name}: {name} is not installed beside hvdkit; run `{command}`")
    faults.report()
    return chosen


def _installed(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a folder of that name, such as ./wandb, has no origin


def overrides(names: Iterable[str]) -> list[str]:
    """What a recipe needs for these trackers, as `key=value`."""
    return ["tensorboard=true"] if TENSORBOARD in names else []


@dataclass(frozen=True)
class Run:
    """A run of `hvdkit train` as trackers get it. `group` is the comparison that it belongs to."""

    folder: Path
    config: Mapping[str, Any]
    group: str | None = None

    @property
    def place(self) -> Path:
        """The folder of the trackers' own files."""
        return self.folder / FOLDER

    def opening(self) -> dict[str, Any]:
        """What a tracker gets at the start."""
        return {"name": self.folder.name, "group": self.group, "folder": str(self.place), "config": self.config}

    def ending(self, status: str) -> dict[str, Any]:
        """What a tracker gets at the end."""
        files = {"result.json": self.folder / "result.json", "recipe.yaml": self.folder / "config.yaml"}
        result = read_result(files["result.json"]) if status == "finished" else None
        written = {name: str(path) for name, path in files.items() if path.exists()}
        return {"status": status, "summary": _summary(result) if result else {}, "files": written}


def _summary(result: TrainResult) -> dict[str, float]:
    values = {key: getattr(result, key) for key in _SUMMARY}
    values |= {f"validation.{name}": value for name, value in (result.validation or {}).items()}
    averages = result.average_validation or {}
    values |= {f"average_validation.{name}": value for name, value in averages.items()}
    return {key: value for key, value in values.items() if value is not None}


class Trackers:
    """Logs runs to the named trackers, as a context manager; `say` gets a line for each run, warning and URL.

    A tracker that cannot be opened is a RequestError: nothing has been started yet. What fails later is a warning.
    """

    def __init__(self, names: Iterable[str], say: Callable[[str], None]) -> None:
        self._clients = [_Client(name, say) for name in names if name in LIBRARIES]
        self._run: Run | None = None
        self._newest = (-1, False)  # line of the run that has been passed on

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the run that is open, as the error says, and the processes."""
        try:
            if self._run:
                stopped = isinstance(error, KeyboardInterrupt | SystemExit | Stopped | Terminated)
                self.end("finished" if error is None else "killed" if stopped else "failed")
        finally:
            for client in self._clients:
                client.close()

    def begin(self, run: Run) -> None:
        """Open a run. Raises RequestError with what each tracker says if that fails."""
        if not self._clients:
            return
        faults, fresh = Faults(), not run.place.exists()
        run.place.mkdir(exist_ok=True)
        for client in self._clients:
            client.open(run)
        for client in self._clients:
            with faults.collected():
                client.wait_opened()
        for client in [] if faults else self._clients:
            client.announce()
        self._run, self._newest = run, (-1, False)
        if faults:
            self.end("failed")  # where others are open
            if fresh:
                shutil.rmtree(run.place)
        faults.report()

    def log(self, line: MetricLine) -> None:
        """Pass on a line of metrics.jsonl."""
        self._newest = max(self._newest, (line.step, line.ends_epoch))
        for client in self._clients:
            client.send(lines=[_values(line)])

    def poll(self) -> None:
        """Send what the processes can take, and report what they say; returns at once."""
        for client in self._clients:
            client.exchange()

    def end(self, status: str) -> None:
        """End the run with the status `finished`, `failed` or `killed`."""
        run, self._run = self._run, None
        if run is None or not self._clients:
            return
        if status == "finished":  # a finished run that is resumed, or one of a comparison, was not followed
            for line in read_metrics(run.folder / "metrics.jsonl"):
                if (line.step, line.ends_epoch) > self._newest:
                    self.log(line)
        message = run.ending(status)
        for client in self._clients:
            client.send(end=message)
        for client in self._clients:
            client.wait_ended(KILLED_S if status == "killed" else END_S)


def _values(line: MetricLine) -> list[Any]:
    return [line.step, line.ends_epoch, scalars(line)]


class _Client:
    """The process of one tracker. It starts with the first run; once it is gone, all methods do nothing."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._process: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._unsent, self._unread = b"", b""
        self._answers: set[str] = set()
        self._fault, self._where, self._runs = "", "", 0

    @property
    def _alive(self) -> bool:
        return bool(self._selector.get_map())

    def open(self, run: Run) -> None:
        """Ask for a run; `wait_opened` waits for it."""
        if self._process is None:
            self._log = run.place / f"{self._name}.log"
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "hvdkit.tracking.client", self._name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the command alone
                )
            assert self._process.stdin and self._process.stdout
            os.set_blocking(self._process.stdin.fileno(), False)
            self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._answers.clear()
        self._runs += 1
        self.send(open=run.opening())

    def wait_opened(self) -> None:
        """Wait until the run is open. Raises RequestError if it is not."""
        if not self._wait("opened", OPEN_S):
            said = self._log.read_text(errors="replace").split("\n")[-2:-1]
            ended = ": ".join(["its process has ended", *said])
            fault = self._fault or (f"no answer within {OPEN_S:.0f} s" if self._alive else ended)
            remedy = "check its settings (docs/results.md), or leave the option out"
            if "sqlite" in fault:  # what mlflow-skinny says of MLflow's default
                remedy = f"run `{sys.executable} -m pip install mlflow`, or set MLFLOW_TRACKING_URI to a server"
            if "filesystem tracking backend" in fault:  # MLflow's, without a server; it names no remedy here
                remedy = "set MLFLOW_ALLOW_FILE_STORE=true, or MLFLOW_TRACKING_URI=sqlite:////…/mlflow.db"
            raise RequestError(f"--log {self._name}: no run can be opened: {fault}; {remedy}")

    def announce(self) -> None:
        """Say where the run can be seen; one address is enough for a whole comparison."""
        if self._runs == 1:
            self._say(f"{self._name}: {self._where}")

    def wait_ended(self, seconds: float) -> None:
        """Wait until the run has ended."""
        if self._alive and not self._wait("ended", seconds) and self._alive:
            self._say(f"{self._name}: the run is not logged completely after {seconds:.0f} s; its log: {self._log}")

    def _wait(self, answer: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._alive and answer not in self._answers and time.monotonic() < deadline:
            self.exchange(0.1)
        return answer in self._answers

    def send(self, **message: Any) -> None:
        """Send a message, as soon as the process takes it."""
        if self._alive:
            self._unsent += json.dumps(message).encode() + b"\n"
            self.exchange()

    def exchange(self, timeout_s: float = 0.0) -> None:
        """Send what the process takes, and read what it answers within the timeout."""
        if not self._alive:
            return
        assert self._process and self._process.stdin and self._process.stdout
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent) :]
        if not self._selector.select(timeout_s):
            return
        data = os.read(self._process.stdout.fileno(), 2**16)
        *texts, self._unread = (self._unread + data).split(b"\n")
        for text in texts:
            answer = json.loads(text)
            self._answers |= answer.keys()
            self._fault = answer.get("fault", self._fault)
            self._where = answer.get("opened", self._where)
            if "warning" in answer:
                self._say(f"{self._name}: {answer['warning']}")
        if not data:
            self._selector.unregister(self._process.stdout)
            if "opened" in self._answers and "ended" not in self._answers:
                self._say(f"{self._name}: logging has ended, training continues; see {self._log}")

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # what is left of it, and what it has started
            self._process.wait()
            self._process.stdout.close()
            self._selector.close()
