"""The trackers of a command's runs (`--log`).

No rank and no runtime needs their libraries: the command follows what rank 0 writes, and a thread passes it on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from hvdkit.errors import Faults, Stopped, nearest
from hvdkit.files import write_atomic
from hvdkit.handlers.tensorboard import scalars
from hvdkit.launch.diagnosis.exits import Terminated
from hvdkit.results.train import MetricLine, read_metrics, read_result
from hvdkit.tracking.libraries import LIBRARIES

T = TypeVar("T")
TENSORBOARD = "tensorboard"  # written by rank 0, as the recipe's key says
NAMES = (*LIBRARIES, TENSORBOARD)
FOLDER = "tracking"  # within a run's folder
OPEN_S = 120.0  # for a library to load, and its server to answer
END_S, KILLED_S = 30.0, 5.0  # until a run is logged completely; after an interrupt its sender waits
# What is shown of a finished run, by the keys of result.json.
_SUMMARY = (
    "images_per_second", "step_ms_p50", "step_ms_p90", "step_ms_p99", "train_loss", "val_accuracy", "val_loss",
    "peak_rss_mib", "train_s", "startup_s", "cpu_s_per_image", "bytes_per_step",
    "tokens_per_second", "model_flop_per_second",
)  # fmt: skip
# By a part of what MLflow says, which names no remedy that helps here.
_REMEDIES = {
    "filesystem tracking backend": "set MLFLOW_ALLOW_FILE_STORE=true, or MLFLOW_TRACKING_URI=sqlite:////…/mlflow.db",
    "sqlite": f"run `{sys.executable} -m pip install mlflow`, or set MLFLOW_TRACKING_URI to a server",
    "": "check its settings (docs/results.md), or leave the option out",
}


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
class TrackedRun:
    """A run of `hvdkit train` as trackers get it. `group` is the comparison that it belongs to."""

    folder: Path
    config: Mapping[str, Any]
    group: str | None = None

    def summary(self) -> dict[str, float]:
        """The figures of the run, which has finished."""
        result = read_result(self.folder / "result.json")
        values = {key: getattr(result, key) for key in _SUMMARY}
        for key in ("validation", "average_validation"):
            values |= {f"{key}.{name}": value for name, value in (getattr(result, key) or {}).items()}
        return {key: value for key, value in values.items() if value is not None}


class Trackers:
    """Logs runs to the named trackers, as a context manager; `say` gets a line for each run, warning and URL.

    A tracker that cannot be opened is a RequestError: nothing has been started yet. What fails later is a warning.
    """

    def __init__(self, names: Iterable[str], say: Callable[[str], None]) -> None:
        self._names, self._say, self._announced = [name for name in names if name in LIBRARIES], say, False
        self._open: list[_Open] = []
        self._stuck = False  # a call has not returned in time, so that nothing waits for the thread any more
        self._run: TrackedRun | None = None
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="trackers", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the run that is open, as the error says."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit | Stopped | Terminated)
        self.end("finished" if error is None else "killed" if stopped else "failed")
        for tracker in self._open:
            self._wait(KILLED_S, tracker.close)

    def _work(self) -> None:
        """Call the libraries, one call after the other."""
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _wait(self, seconds: float, call: Callable[[], T]) -> T | str:
        """The result of a call or, in a line, why there is none."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        try:
            return future.result(0 if self._stuck else seconds)
        except TimeoutError:
            self._stuck = True
            return f"no answer within {seconds:.0f} s"
        except Exception as error:
            return reason(error)

    def begin(self, run: TrackedRun) -> None:
        """Open a run. Raises RequestError with what each tracker says if that fails."""
        if not self._names:
            return
        faults, folder = Faults(), run.folder / FOLDER
        fresh, self._open = not folder.exists(), []
        folder.mkdir(exist_ok=True)
        for name in self._names:
            opened = self._wait(OPEN_S, partial(_Open, name, run, folder, self._say))
            if isinstance(opened, str):
                remedy = next(remedy for part, remedy in _REMEDIES.items() if part in opened)
                faults.append(f"--log {name}: no run can be opened: {opened}; {remedy}")
            else:
                self._open.append(opened)
        self._run = run
        if faults:
            self.end("failed")  # where others are open
            if fresh:
                shutil.rmtree(folder)
        faults.report()
        for tracker in [] if self._announced else self._open:  # one address is enough for a whole comparison
            self._say(f"{tracker.name}: {tracker.where}")
        self._announced = True

    def log(self, line: MetricLine) -> None:
        """Pass on a line of metrics.jsonl; returns at once."""
        for tracker in self._open:
            self._calls.put((Future(), partial(tracker.log, line)))

    def end(self, status: str) -> None:
        """End the run with the status `finished`, `failed` or `killed`."""
        run, self._run = self._run, None
        if run is None:
            return
        for tracker in self._open:
            seconds = KILLED_S if status == "killed" else END_S
            if why := self._wait(seconds, partial(tracker.end, status)):
                self._say(f"{tracker.name}: the run is not logged completely: {why}")


class _Open:
    """A run that is open in one tracker. Its `log` and `end` wait for the tracker.

    `tracking/NAME.json` keeps the tracker's id of the run and the last line that it has, so that a resumed run
    continues in the same place without gaps or duplicates.
    """

    def __init__(self, name: str, run: TrackedRun, folder: Path, say: Callable[[str], None]) -> None:
        self.name, self._run, self._say, self._state = name, run, say, folder / f"{name}.json"
        known = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._library = LIBRARIES[name](run.config, run.folder.name, run.group, folder, known.get("id"))
        self.where, self.close, self._failed = self._library.where, self._library.close, False
        self._last = (known["step"], known["ends_epoch"]) if known.get("id") == self._library.id else (-1, False)
        self._keep()

    def log(self, line: MetricLine) -> None:
        """Log a line, except what is known: a resumed run writes its earlier lines again. A failure is a warning."""
        if self._failed or (line.step, line.ends_epoch) <= self._last:
            return
        try:
            self._log(line)
        except Exception as error:
            self._failed = True
            later = "training continues, and they are logged at its end"
            self._say(f"{self.name}: metrics cannot be logged: {reason(error)}; {later}")

    def _log(self, line: MetricLine) -> None:
        self._library.log(line.step, scalars(line))
        self._last = (line.step, line.ends_epoch)
        self._keep()

    def _keep(self) -> None:
        state = {"id": self._library.id, "step": self._last[0], "ends_epoch": self._last[1]}
        write_atomic(self._state, json.dumps(state) + "\n")

    def end(self, status: str) -> None:
        """Log what has not been logged, and end the run."""
        finished = status == "finished"
        folder = self._run.folder
        files = {"result.json": folder / "result.json", "recipe.yaml": folder / "config.yaml"}
        try:
            for line in read_metrics(folder / "metrics.jsonl") if finished or self._failed else ():
                if (line.step, line.ends_epoch) > self._last:
                    self._log(line)
        finally:
            self._library.end(
                status,
                max(0, self._last[0]),
                self._run.summary() if finished else {},
                {name: path for name, path in files.items() if path.exists()},
            )


def reason(error: Exception) -> str:
    """An error in a line, without credentials."""
    text = " ".join(re.sub(r"(?<=://)[^/@\s]+(?=@)", "…", str(error) or type(error).__name__).split())
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|PASSWORD|SECRET", name, re.IGNORECASE) and len(value) >= 6:
            text = text.replace(value, "…")
    return text if len(text) <= 300 else f"{text[:297]}..."
