"""The process beside a command that hands runs to one tracker: `python -m hvdkit.tracking.client wandb`.

It reads messages from standard input and answers on standard output, one JSON object a line each way:

    {"open": {"name", "group", "folder", "config"}}     ->  {"opened": where the run can be seen}, or {"fault": why not}
    {"lines": [[step, ends_epoch, {tag: value}], ...]}  ->  {"warning": ...} if it fails; tried again later
    {"end": {"status", "summary", "files"}}             ->  {"ended": true}, or {"warning": ...} before it

The end of the input without "end" means that the command was killed. `folder/<tracker>.json` keeps the tracker's id of
the run and the last line that it has, so that a resumed run continues in the same place without gaps or duplicates.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

Line = tuple[int, bool, dict[str, float]]  # step, whether it ends an epoch, value by tag
Status = Literal["finished", "failed", "killed"]
RETRY_S = 10.0  # between two attempts to send lines
_CONTROL = re.compile(r"\s+")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)


class Tracker(Protocol):
    """One tracker's run at a time. Each method may raise anything."""

    def open(self, run: Mapping[str, Any], known: str | None) -> tuple[str, str]:
        """Begin a run, or continue the `known` one; returns its id, and where it can be seen."""

    def log(self, lines: list[Line]) -> None:
        """Send lines, all or none."""

    def end(self, status: Status, step: int, summary: Mapping[str, float], files: Mapping[str, str]) -> None:
        """End the run at that step, with its final figures and files (path by the name to show)."""


class Wandb:
    """W&B, set up by its own environment variables (WANDB_MODE, WANDB_PROJECT, ...) or `wandb login`."""

    def __init__(self) -> None:
        # For files to upload, which a later `wandb sync` needs, and for W&B's logs; else they go to the home folder.
        folders = {"WANDB_DATA_DIR": "wandb", "WANDB_CACHE_DIR": ""}
        self._places = {name: inner for name, inner in folders.items() if name not in os.environ}

    def open(self, run: Mapping[str, Any], known: str | None) -> tuple[str, str]:
        place = os.environ.get("WANDB_DIR", run["folder"])
        os.environ |= {name: str(Path(place) / inner) for name, inner in self._places.items()}
        import wandb

        settings: dict[str, Any] = {"console": "off", "silent": True}
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = 30.0
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hvdkit"),
            name=os.environ.get("WANDB_NAME", run["name"]),
            group=os.environ.get("WANDB_RUN_GROUP", run["group"]),
            dir=place,
            id=known,
            resume="allow" if known else None,
            settings=wandb.Settings(**settings),
        )
        self._run.config.update(run["config"], allow_val_change=True)
        self._run.define_metric("*", step_metric="step")  # a resumed run may send a step again
        if self._run.offline:
            place = Path(self._run.settings.sync_dir).parent
            return self._run.id, f"offline; upload it with `wandb sync {place}/offline-run-*-{self._run.id}`"
        return self._run.id, self._run.url or "disabled"

    def log(self, lines: list[Line]) -> None:
        for step, _, values in lines:
            self._run.log({"step": step, **values})

    def end(self, status: Status, step: int, summary: Mapping[str, float], files: Mapping[str, str]) -> None:
        self._run.summary.update(dict(summary))
        if files:
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
            for name, path in files.items():
                artifact.add_file(path, name=name, skip_cache=True)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 255}[status])  # 255: W&B's for Ctrl-C


class MLflow:
    """MLflow, set up by its own environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...)."""

    def open(self, run: Mapping[str, Any], known: str | None) -> tuple[str, str]:
        # Else it tries for minutes before it reports that a server is gone.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = client = mlflow.MlflowClient()
        if known:
            try:
                client.update_run(known, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                known = None  # deleted, or of another server
        if not known:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "hvdkit")
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or mlflow.set_experiment(name).experiment_id
            tags = {"group": run["group"]} if run["group"] else {}
            known = client.create_run(experiment, run_name=run["name"], tags=tags).info.run_id
            params = [Param(_allowed(key), str(value)) for key, value in _flat(run["config"]).items()]
            for first in range(0, len(params), 100):  # the most that a request may have
                client.log_batch(known, params=params[first : first + 100])
        self._id = known
        return known, f"run {known} at {client.tracking_uri}"

    def log(self, lines: list[Line]) -> None:
        from mlflow.entities import Metric

        now = int(1e3 * time.time())
        metrics = [
            Metric(_allowed(tag), value, now, step) for step, _, values in lines for tag, value in values.items()
        ]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

    def end(self, status: Status, step: int, summary: Mapping[str, float], files: Mapping[str, str]) -> None:
        try:
            self.log([(step, True, dict(summary))])
            for name, path in files.items():
                self._client.log_text(self._id, Path(path).read_text(), name)
        finally:
            self._client.set_terminated(self._id, status="FINISHED" if status == "finished" else status.upper())


def _allowed(name: str) -> str:
    """The name with the characters that MLflow allows in one."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": MLflow}


class _Run:
    """A run that is open in a tracker, and the lines that the tracker does not have yet."""

    def __init__(self, name: str, tracker: Tracker, run: Mapping[str, Any]) -> None:
        self._tracker = tracker
        self._state = Path(run["folder"]) / f"{name}.json"
        known = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._id, self.where = tracker.open(run, known.get("id"))
        self._last = (known["step"], known["ends_epoch"]) if known.get("id") == self._id else (-1, False)
        self._waiting: list[Line] = []
        self._retry_at, self._warned = 0.0, False
        self._keep()

    def add(self, lines: list[Line]) -> None:
        """Take lines, except those that are known: a resumed run writes its earlier ones again."""
        newest = self._waiting[-1][:2] if self._waiting else self._last
        for step, ends_epoch, values in lines:
            if (step, ends_epoch) > newest:
                newest = (step, ends_epoch)
                self._waiting.append((step, ends_epoch, values))

    def send(self, now: bool = False) -> str | None:
        """Send what waits, after a failure only each RETRY_S or `now`. Returns a warning for the first failure."""
        if not self._waiting or (time.monotonic() < self._retry_at and not now):
            return None
        try:
            self._tracker.log(self._waiting)
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_S
            first, self._warned = not self._warned, True
            what = f"metrics cannot be logged: {reason(error)}; training continues, and logging is tried again"
            return what if first else None
        self._last = self._waiting[-1][:2]
        self._waiting = []
        with suppress(OSError):  # a full disk; the tracker has the lines
            self._keep()
        return None

    def end(self, status: Status, summary: Mapping[str, float], files: Mapping[str, str]) -> str | None:
        """Send the rest and end the run; returns a warning if that fails."""
        warning = self.send(now=True)
        try:
            self._tracker.end(status, max(0, self._last[0]), summary, files)
        except Exception as error:
            return f"the run cannot be ended as {status}: {reason(error)}"
        lost = f"{len(self._waiting)} lines of metrics are not logged" if self._waiting else None
        return warning or lost

    def _keep(self) -> None:
        state = {"id": self._id, "step": self._last[0], "ends_epoch": self._last[1]}
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps(state) + "\n")
        fresh.replace(self._state)


def reason(error: Exception) -> str:
    """An error in a line, without credentials."""
    text = _CREDENTIALS.sub("…", _CONTROL.sub(" ", str(error) or type(error).__name__).strip())
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "…")
    return text if len(text) <= 300 else text[:297] + "..."


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= {f"{key}.{inner}": leaf for inner, leaf in _flat(value).items()}
        else:
            values[key] = value
    return values


def serve(name: str) -> int:
    """Answer messages until the input ends; the exit status is 1 after a fault."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(**message: Any) -> None:
        try:
            print(json.dumps(message), file=answers, flush=True)
        except OSError:  # the command was killed, and its run is still to be ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())

    tracker, run, rest = TRACKERS[name](), None, b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.5)
        data = os.read(0, 2**16) if ready else b""
        *texts, rest = (rest + data).split(b"\n")
        for text in texts:
            message = json.loads(text)
            if "open" in message:
                try:
                    run = _Run(name, tracker, message["open"])
                except Exception as error:
                    answer(fault=reason(error))
                    return 1
                os.nice(max(0, 10 - os.nice(0)))  # from now on nobody waits for it, and ranks come first
                answer(opened=_CREDENTIALS.sub("…", run.where))
            elif run and "lines" in message:
                run.add([(step, ends, values) for step, ends, values in message["lines"]])
            elif run:
                if warning := run.end(**message["end"]):
                    answer(warning=warning)
                answer(ended=True)
                run = None
        if run and (warning := run.send()):
            answer(warning=warning)
        if ready and not data:
            if run:
                run.end("killed", {}, {})
            return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
