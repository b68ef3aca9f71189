"""`tune: measure`: short runs before the run itself, to find the fastest settings on this machine and network."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvdkit import tasks
from hvdkit.commands.checked_run import CheckedRun, MetricsTail, launch
from hvdkit.files import write_atomic
from hvdkit.recipe import schema
from hvdkit.results.train import MetricLine
from hvdkit.worker import tuning
from hvdkit.worker.tuning import CHOSEN, CYCLE, IDLE

RULE = "woken by tensors"  # the rule's choice, without further settings
SETTINGS: dict[str, dict[str, str]] = {RULE: {}} | {
    f"a cycle of {ms} ms": {IDLE: "0", CYCLE: str(ms)} for ms in (2, 5, 15)
}
ROUNDS, WARMUP_STEPS, STEPS, PART = 3, 10, 40, 5  # a speed is logged each PART steps
GAIN = 1.02  # of a median over the rule's; less may be chance


class _Enough(Exception):
    """A short run has been measured."""


def searches(plan: CheckedRun) -> bool:
    """Whether settings are searched for in this run.

    Not with one rank, which reduces nothing; not in an elastic run, where Horovod mixes up cycle times as ranks join;
    not on GPUs, where no core is short; and not where the environment has a cycle time.
    """
    recipe = plan.recipe
    wanted = recipe.tune == "measure" and not plan.rival and CYCLE not in os.environ
    return wanted and plan.np > 1 and not recipe.elastic and recipe.device != "gpu"


def measured(plan: CheckedRun, folder: Path) -> CheckedRun:
    """The plan with the settings at which short runs in `folder` were fastest; their files are removed.

    Each runs STEPS updates of the recipe in each of ROUNDS rounds, in random order. Raises what the launcher raises.
    """
    if not searches(plan):
        return plan
    speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    scratch, unit = folder / "tuning", tasks.choose(plan.recipe).unit
    try:
        for number in range(ROUNDS):
            for name in random.Random(number).sample(list(SETTINGS), len(SETTINGS)):
                speeds[name].append(_speed(replace(plan, settings=SETTINGS[name]), scratch))
                speed = f"{speeds[name][-1]:.0f} {unit}/s {name}"
                print(f"tuning, round {number + 1} of {ROUNDS}: {speed}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    best, why = choose(speeds, unit)
    settings = SETTINGS[best] or tuning.environment(plan.recipe, os.environ)
    chosen = {name: {"value": int(value), "why": why} for name, value in settings.items() if name in (IDLE, CYCLE)}
    return replace(plan, settings=settings | {CHOSEN: json.dumps(chosen)})


def choose(speeds: Mapping[str, list[float]], unit: str) -> tuple[str, str]:
    """The SETTINGS with the highest median speed in `unit` per second, and why: the rule's unless others are GAIN
    times as fast.
    """
    medians = {name: statistics.median(measured) for name, measured in speeds.items()}
    fastest = max(medians, key=lambda name: medians[name])
    best = fastest if medians[fastest] > GAIN * medians[RULE] else RULE
    table = ", ".join(f"{medians[name]:.0f} {name}" for name in speeds)
    rounds = len(next(iter(speeds.values())))
    rule = "" if best != RULE else f"; the rule's stays unless another gains {100 * (GAIN - 1):.0f} %"
    return best, f"measured before the run, {unit}/s, medians of {rounds} short runs: {table}{rule}"


def _speed(plan: CheckedRun, folder: Path) -> float:
    """Units per second of the updates between WARMUP_STEPS and STEPS, the median of their parts."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    changes = {"checkpoint": None, "early_stopping": None, "tensorboard": False, "tune": "rule"}
    short = plan.recipe.model_copy(update={**changes, "log_every": PART})
    write_atomic(folder / "config.yaml", schema.dump(short))
    speeds: list[float] = []

    def watch(line: MetricLine) -> None:
        if line.step > WARMUP_STEPS and not line.ends_epoch:
            speeds.append(line.images_per_second)
        if len(speeds) >= (STEPS - WARMUP_STEPS) // PART:
            raise _Enough

    tail = MetricsTail(folder / "metrics.jsonl", watch)
    with contextlib.suppress(_Enough):
        launch(plan, folder / "config.yaml", ["--out", str(folder)], folder / "logs", tail.poll)
        tail.poll()
    return statistics.median(speeds) if speeds else 0.0
