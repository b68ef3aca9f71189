"""`hvdkit train`: one run, its metrics while it runs, and its result."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.commands import tune
from hvdkit.commands.plan import MetricsTail, Plan, Watch, launch
from hvdkit.errors import RequestError, RunError, Stopped
from hvdkit.files import write_atomic
from hvdkit.recipe import schema
from hvdkit.report import csv_files
from hvdkit.results.train import MetricLine, TrainResult, read_metrics, read_result
from hvdkit.tracking import trackers as tracking
from hvdkit.tracking.trackers import Trackers

PREEMPTION_GRACE_S = 25.0  # to write a checkpoint after SIGTERM; with the end of all ranks it stays below 30 s


def run(
    plan: Plan, folder: Path, watch: Watch | None = None, resume: bool = False, trackers: Trackers | None = None
) -> TrainResult:
    """Run to the end, writing into `folder` (absolute, existing, empty); `watch` gets each line of metrics.jsonl.

    `trackers` get the lines too. Their run is begun here, and ended by whoever has opened them.
    With `resume` the folder may hold an earlier run of the recipe, which goes on from its newest checkpoint; if it had
    finished, its result is returned.
    Raises what the launcher raises: a rank's failure, a fault that only a rank could find, an interrupt; and Stopped
    where SIGTERM ended training after a checkpoint.
    """
    trackers = trackers or Trackers([], print)
    trackers.begin(tracked(plan, folder))
    config, metrics, result = (folder / name for name in ("config.yaml", "metrics.jsonl", "result.json"))
    before = {path: path.read_bytes() for path in (config, result) if path.exists()}
    lines = _size(metrics)
    if resume:
        done = finished(plan, folder)
        if done:
            return done
        from hvdkit.checkpoint.resume import pick  # NumPy comes with it

        found, complaints = pick(folder / "checkpoints", plan.recipe)
        step = f"step {found.record.progress.step}" if found else "the beginning: there is no checkpoint"
        for line in [*complaints, f"{folder}: goes on from {step}"]:
            print(line, file=sys.stderr, flush=True)
        result.unlink(missing_ok=True)  # of a shorter run, or with other settings that may change
    plan = tune.measured(plan, folder)
    write_atomic(config, schema.dump(plan.recipe))

    def see(line: MetricLine) -> None:
        trackers.log(line)
        if watch:
            watch(line)

    tail = MetricsTail(metrics, see)

    def look() -> None:
        tail.poll()
        trackers.poll()

    arguments = ["--out", str(folder), *(["--resume"] if resume else [])]
    grace_s = PREEMPTION_GRACE_S if plan.recipe.checkpoint else 0.0
    try:
        launch(plan, config, arguments, folder / "logs", look, grace_s)
        look()
    except BaseException as error:
        if isinstance(error, RequestError) and _size(metrics) == lines:
            for path, content in before.items():  # nothing was trained, so the earlier run's files still hold
                write_atomic(path, content)
        else:
            with suppress(RunError):  # the failure of the run matters more
                _save_csv(folder)
        raise
    _save_csv(folder)
    if not result.exists():
        kept = sorted((folder / "checkpoints").glob("step-*"))
        raise Stopped(f"stopped by SIGTERM behind {kept[-1] if kept else 'no checkpoint'}; go on with --resume")
    return read_result(result)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _save_csv(folder: Path) -> None:
    csv_files.save(folder / "metrics.csv", csv_files.metrics(read_metrics(folder / "metrics.jsonl")))


def tracked(plan: Plan, folder: Path, group: str | None = None) -> tracking.Run:
    """The run as trackers get it: the resolved recipe, and what the command line has chosen."""
    config: dict[str, Any] = plan.recipe.model_dump(mode="json") | {
        "framework": plan.framework,
        "np": plan.np,
        "rival": plan.rival,
        "launcher": plan.placement.launcher,
        "hvdkit_version": hvdkit.__version__,
    }
    return tracking.Run(folder, config, group)


def finished(plan: Plan, folder: Path) -> TrainResult | None:
    """The result of an earlier run in the folder, if it is of this plan and has finished."""
    try:
        same = schema.load(folder / "config.yaml") == plan.recipe
        result = read_result(folder / "result.json") if same and (folder / "result.json").exists() else None
    except RequestError:
        return None
    if result is None or (result.framework, result.rival) != (plan.framework, plan.rival):
        return None
    return result if plan.recipe.elastic or result.np == plan.np else None  # elastic runs may have lost some
