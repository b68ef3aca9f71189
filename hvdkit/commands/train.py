"""`hvdkit train`: one run, its metrics while it runs, and its result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hvdkit.commands import tune
from hvdkit.commands.plan import Plan, launch
from hvdkit.errors import RequestError, Stopped
from hvdkit.files import write_atomic
from hvdkit.recipe import schema
from hvdkit.results.runs import MetricLine, TrainResult, read_result

Watch = Callable[[MetricLine], None]
PREEMPTION_GRACE_S = 25.0  # to write a checkpoint after SIGTERM; with the end of all ranks it stays below 30 s


def run(plan: Plan, folder: Path, watch: Watch | None = None, resume: bool = False) -> TrainResult:
    """Run to the end, writing into `folder` (absolute, existing, empty); `watch` gets each line of metrics.jsonl.

    With `resume` the folder may hold an earlier run of the recipe, which goes on from its newest checkpoint; if it had
    finished, its result is returned.
    Raises what the launcher raises: a rank's failure, a fault that only a rank could find, an interrupt; and Stopped
    where SIGTERM ended training after a checkpoint.
    """
    result = folder / "result.json"
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
    write_atomic(folder / "config.yaml", schema.dump(plan.recipe))
    tail = _Tail(folder / "metrics.jsonl", watch)
    arguments = ["--out", str(folder), *(["--resume"] if resume else [])]
    grace_s = PREEMPTION_GRACE_S if plan.recipe.checkpoint else 0.0
    launch(plan, folder / "config.yaml", arguments, folder / "logs", tail.poll, grace_s)
    tail.poll()
    if not result.exists():
        kept = sorted((folder / "checkpoints").glob("step-*"))
        raise Stopped(f"stopped by SIGTERM behind {kept[-1] if kept else 'no checkpoint'}; go on with --resume")
    return read_result(result)


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


class _Tail:
    """Passes each new complete line of a growing metrics.jsonl to `watch`.

    Rank 0 replaces the file when it starts, with the lines of an earlier run that are still valid. A file that is there
    before is not read.
    """

    def __init__(self, path: Path, watch: Watch | None) -> None:
        self._path, self._watch, self._offset = path, watch, 0
        self._old = path.stat().st_ino if path.exists() else None
        self._now: int | None = None

    def poll(self) -> None:
        """Read what has come since the last call."""
        if self._watch is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number == self._old:
                return
            if number != self._now:  # replaced again, by the first rank of an elastic run that goes on
                self._now, self._offset = number, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._offset += len(line)
                self._watch(MetricLine.model_validate_json(line))
