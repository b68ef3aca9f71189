"""`hvdkit train`: one run, watched, and its result read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hvdkit.commands import tune
from hvdkit.commands.plan import Plan, launch
from hvdkit.errors import RequestError, Stopped
from hvdkit.files import write_atomic
from hvdkit.launch.job import Elastic
from hvdkit.recipe import schema
from hvdkit.results.train import MetricLine, TrainResult, read_result

Watch = Callable[[MetricLine], None]
FAREWELL_S = 25.0  # for a checkpoint behind SIGTERM; with the end of all ranks it stays below 30 s


def run(plan: Plan, folder: Path, watch: Watch | None = None, resume: bool = False) -> TrainResult:
    """Run to the end, writing into `folder` (absolute, there and empty); `watch` sees each line of metrics.jsonl.

    With `resume` the folder may hold an earlier run of the recipe: it goes on from its newest checkpoint, and one that
    had come to its end gives its result again.
    Raises what the launcher raises: a rank's failure, a fault that only a rank could find, an interrupt; and Stopped
    where SIGTERM ended training behind a checkpoint.
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
    farewell_s = FAREWELL_S if plan.recipe.checkpoint else 0.0
    bounds = plan.recipe.elastic
    elastic = Elastic(bounds.min_np, bounds.max_np, plan.discovery) if bounds else None
    launch(plan, folder / "config.yaml", arguments, folder / "logs", tail.poll, farewell_s, elastic)
    tail.poll()
    if not result.exists():
        kept = sorted((folder / "checkpoints").glob("step-*"))
        raise Stopped(f"stopped by SIGTERM behind {kept[-1] if kept else 'no checkpoint'}; go on with --resume")
    return read_result(result)


def finished(plan: Plan, folder: Path) -> TrainResult | None:
    """The result of an earlier run in the folder, if it was the plan's and came to its end."""
    try:
        same = schema.load(folder / "config.yaml") == plan.recipe
        result = read_result(folder / "result.json") if same and (folder / "result.json").exists() else None
    except RequestError:
        return None
    if result is None or (result.framework, result.rival) != (plan.framework, plan.rival):
        return None
    return result if plan.recipe.elastic or result.np == plan.np else None  # elastic runs may have lost some


class _Tail:
    """Hands each new whole line of a growing metrics.jsonl to `watch`.

    Rank 0 replaces the file when it starts, by what of an earlier run counts: what is there now is not looked at.
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
