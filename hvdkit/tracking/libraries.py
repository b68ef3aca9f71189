"""W&B and MLflow: how each opens a run, takes metrics and ends the run. Each function may raise anything."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.results.json_files import flat

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
