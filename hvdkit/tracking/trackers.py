"""The trackers of a command's runs (`--log`). No rank needs their libraries: the command passes on what rank 0 writes.

Nothing waits long for a tracker, by the limits that are set here to the libraries' own requests.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hvdkit.errors import Faults, Stopped, nearest
from hvdkit.files import write_atomic
from hvdkit.handlers.tensorboard import scalars
from hvdkit.launch.diagnosis.exits import Terminated
from hvdkit.results.json_files import flat
from hvdkit.results.train import MetricLine, TrainResult, read_metrics

Values = Mapping[str, float]
Files = Mapping[str, Path]  # by the names to show


@dataclass(frozen=True)
class TrackedRun:
    """A run of `hvdkit train` as trackers get it. `group` is the comparison that it belongs to."""

    folder: Path
    config: Mapping[str, Any]
    group: str | None = None

    @property
    def tracking(self) -> Path:
        """The folder of what trackers keep."""
        return self.folder / "tracking"


class Wandb:
    """A run in W&B, set up by its own environment variables (WANDB_MODE, WANDB_PROJECT, ...) or `wandb login`."""

    def __init__(self, run: TrackedRun, known: str | None) -> None:
        """Begin a run, or continue the `known` one. `id` identifies it, and `where` is where it can be seen."""
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # `init` logs in before it reads its settings
        waits = {"INIT_TIMEOUT": 30.0, "FINISH_TIMEOUT": 30.0}
        self._run = opened = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hvdkit"),
            name=os.environ.get("WANDB_NAME", run.folder.name),
            group=os.environ.get("WANDB_RUN_GROUP", run.group),
            dir=os.environ.get("WANDB_DIR", run.tracking),
            id=known,
            resume="allow" if known else None,
            reinit="create_new",
            settings={"console": "off", "silent": True}
            | {key.lower(): seconds for key, seconds in waits.items() if f"WANDB_{key}" not in os.environ},
        )
        os.environ.pop("WANDB_SERVICE", None)  # the command's own; a script of the user's may start another
        opened.config.update(dict(run.config), allow_val_change=True)
        opened.define_metric("*", step_metric="step")  # a resumed run may send a step again
        self.id, self.where = opened.id, opened.url or "disabled"
        if opened.offline:
            folder = Path(opened.dir).parents[1]
            self.where = f"offline; upload it with `wandb sync {folder}/offline-run-*-{opened.id}`"

    def log(self, step: int, values: Values) -> None:
        """Log the metrics of a step."""
        self._run.log({"step": step, **values})

    def end(self, status: str, step: int, summary: Values, files: Files) -> None:
        """End the run, `finished`, `failed` or `killed` after the step, and W&B's process."""
        import wandb

        try:
            self._run.summary.update(dict(summary))
            for name, path in files.items():
                self._run.save(shutil.copy(path, Path(self._run.dir) / name), self._run.dir, "now")
            self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 255}[status])  # 255: W&B's for Ctrl-C
        finally:
            wandb.teardown()


class MLflow:
    """A run in MLflow, set up by its own environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...)."""

    def __init__(self, run: TrackedRun, known: str | None) -> None:
        """As `Wandb`'s."""
        # Else it tries for minutes before it reports that a server is gone.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        import mlflow

        self._mlflow, opened = mlflow, None
        try:
            opened = mlflow.start_run(known) if known else None
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # deleted, or of another server
                raise
        if opened is None:
            if not os.environ.get("MLFLOW_EXPERIMENT_ID"):
                mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "hvdkit"))
            opened = mlflow.start_run(run_name=run.folder.name, tags={"group": run.group} if run.group else None)
            params = iter({_allowed(key): value for key, value in flat(run.config).items()}.items())
            while some := dict(itertools.islice(params, 100)):  # the most that a request may have
                mlflow.log_params(some)
        self.id, self.where = opened.info.run_id, f"run {opened.info.run_id} at {mlflow.get_tracking_uri()}"

    def log(self, step: int, values: Values) -> None:
        """As `Wandb.log`."""
        self._mlflow.log_metrics({_allowed(tag): value for tag, value in values.items()}, step)

    def end(self, status: str, step: int, summary: Values, files: Files) -> None:
        """As `Wandb.end`."""
        try:
            self.log(step, summary)
            for name, path in files.items():
                self._mlflow.log_text(path.read_text(), name)
        finally:
            self._mlflow.end_run("FINISHED" if status == "finished" else status.upper())


def _allowed(name: str) -> str:
    """The name with the characters that MLflow allows in one."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)


LIBRARIES: dict[str, type[Wandb | MLflow]] = {"wandb": Wandb, "mlflow": MLflow}

TENSORBOARD = "tensorboard"  # written by rank 0, as the recipe's key says
NAMES = (*LIBRARIES, TENSORBOARD)
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
        spec = find_spec(name) if name in LIBRARIES else None
        if name not in NAMES:
            faults.append(f"--log {name}: expected one of {', '.join(NAMES)}{nearest(name, NAMES)}")
        elif name in LIBRARIES and not (spec and spec.origin):  # a folder of that name, such as ./wandb, has no origin
            command = shlex.join([sys.executable, "-m", "pip", "install", f"hvdkit[{name}]"])
            faults.append(f"--log {name}: {name} is not installed beside hvdkit; run `{command}`")
    faults.report()
    return chosen


def overrides(names: Iterable[str]) -> list[str]:
    """What a recipe needs for these trackers, as `key=value`."""
    return ["tensorboard=true"] if TENSORBOARD in names else []


class Trackers:
    """Logs runs to the named trackers, as a context manager; `say` gets a line for each run, warning and URL.

    A tracker that cannot be opened is a RequestError: nothing has been started yet. What fails later is a warning.
    """

    def __init__(self, names: Iterable[str], say: Callable[[str], None]) -> None:
        self._names, self._say, self._announced = [name for name in names if name in LIBRARIES], say, False
        self._open: list[_Open] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the run that is open, as the error says."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit | Stopped | Terminated)
        self.end("finished" if error is None else "killed" if stopped else "failed")

    def begin(self, run: TrackedRun) -> None:
        """Open a run. Raises RequestError with what each tracker says if that fails."""
        if not self._names:
            return
        faults, fresh = Faults(), not run.tracking.exists()
        run.tracking.mkdir(exist_ok=True)
        for name in self._names:
            try:
                self._open.append(_Open(name, run))
            except Exception as error:
                remedy = next(remedy for part, remedy in _REMEDIES.items() if part in str(error))
                faults.append(f"--log {name}: no run can be opened: {reason(error)}; {remedy}")
        if faults:
            self.end("failed")  # where others are open
            if fresh:
                shutil.rmtree(run.tracking)
        faults.report()
        for tracker in [] if self._announced else self._open:  # one address is enough for a whole comparison
            self._say(f"{tracker.name}: {tracker.library.where}")
        self._announced = True

    def log(self, line: MetricLine) -> None:
        """Pass on a line of metrics.jsonl."""
        for tracker in [tracker for tracker in self._open if not tracker.failed]:
            try:
                tracker.log(line)
            except Exception as error:
                tracker.failed = True
                later = "training continues, and they are logged at its end"
                self._say(f"{tracker.name}: metrics cannot be logged: {reason(error)}; {later}")

    def end(self, status: str) -> None:
        """End the run with the status `finished`, `failed` or `killed`."""
        while self._open:
            tracker = self._open.pop(0)
            try:
                tracker.end(status)
            except Exception as error:
                self._say(f"{tracker.name}: the run is not logged completely: {reason(error)}")


class _Open:
    """A run that is open in one tracker.

    `tracking/NAME.json` keeps the tracker's id of the run and the last line that it has, so that a resumed run
    continues in the same place without gaps or duplicates.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.failed, self._run, self._state = name, False, run, run.tracking / f"{name}.json"
        known = json.loads(self._state.read_text()) if self._state.exists() else {}
        self.library = LIBRARIES[name](run, known.get("id"))
        self._last = (known["step"], known["ends_epoch"]) if known.get("id") == self.library.id else (-1, False)
        self._keep()

    def _keep(self) -> None:
        state = {"id": self.library.id, "step": self._last[0], "ends_epoch": self._last[1]}
        write_atomic(self._state, json.dumps(state) + "\n")

    def log(self, line: MetricLine) -> None:
        """Log a line, except what is known: a resumed run writes its earlier lines again."""
        if (line.step, line.ends_epoch) > self._last:
            self.library.log(line.step, scalars(line))
            self._last = (line.step, line.ends_epoch)
            self._keep()

    def end(self, status: str) -> None:
        """Log what has not been logged, and end the run."""
        folder, finished = self._run.folder, status == "finished"
        files = {"result.json": folder / "result.json", "recipe.yaml": folder / "config.yaml"}
        existing = {name: path for name, path in files.items() if path.exists()}
        try:
            for line in read_metrics(folder / "metrics.jsonl") if finished or self.failed else ():
                self.log(line)
        finally:
            summary = _summary(TrainResult.read(files["result.json"])) if finished else {}
            self.library.end(status, max(0, self._last[0]), summary, existing)


def _summary(result: TrainResult) -> dict[str, float]:
    """The figures of a finished run."""
    values = {key: getattr(result, key) for key in _SUMMARY}
    for key in ("validation", "average_validation"):
        values |= {f"{key}.{name}": value for name, value in (getattr(result, key) or {}).items()}
    return {key: value for key, value in values.items() if value is not None}


def reason(error: Exception) -> str:
    """An error in a line, without credentials."""
    text = " ".join(re.sub(r"(?<=://)[^/@\s]+(?=@)", "…", str(error) or type(error).__name__).split())
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|PASSWORD|SECRET", name, re.IGNORECASE) and len(value) >= 6:
            text = text.replace(value, "…")
    return text if len(text) <= 300 else f"{text[:297]}..."
