"""`tune: measure`: short runs before the run itself, to find what no rule knows of a machine and a network."""

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

from pydantic import ValidationError

from hvdkit.commands.plan import Plan, launch
from hvdkit.core import tuning
from hvdkit.core.tuning import CHOSEN, CYCLE, IDLE
from hvdkit.files import write_atomic
from hvdkit.recipe import schema
from hvdkit.results.train import MetricLine

RULE = "woken by tensors"  # the rule's choice, to which nothing is added
SETTINGS: dict[str, dict[str, str]] = {RULE: {}} | {
    f"a cycle of {ms} ms": {IDLE: "0", CYCLE: str(ms)} for ms in (2, 5, 15)
}
ROUNDS, WARMUP_STEPS, STEPS, PART = 3, 10, 40, 5  # a speed is told each PART steps
GAIN = 1.02  # of a median over the rule's; less is luck


class _Enough(Exception):
    """A short run has shown what it was for."""


def searched(plan: Plan) -> str | None:
    """Why there is nothing to search for in this run; None where there is."""
    if plan.rival or plan.recipe.tune != "measure":
        return "the recipe does not ask"
    if plan.np == 1:
        return "one rank reduces nothing"
    if plan.recipe.elastic:
        return "Horovod mixes cycle times up as ranks join"
    if plan.recipe.device == "gpu":
        return "no core is short where GPUs compute"
    return "the environment has HOROVOD_CYCLE_TIME" if CYCLE in os.environ else None


def measured(plan: Plan, folder: Path) -> Plan:
    """The plan with the settings at which short runs in `folder` were fastest; they leave nothing behind.

    Each runs STEPS updates of the recipe in each of ROUNDS rounds, in random order. Raises what the launcher raises.
    """
    if searched(plan) is not None:
        return plan
    speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    place = folder / "tuning"
    try:
        for number in range(ROUNDS):
            for name in random.Random(number).sample(list(SETTINGS), len(SETTINGS)):
                speeds[name].append(_speed(replace(plan, settings=SETTINGS[name]), place))
                told = f"{speeds[name][-1]:.0f} images/s {name}"
                print(f"tuning, round {number + 1} of {ROUNDS}: {told}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    best, why = choose(speeds)
    settings = SETTINGS[best] or tuning.environment(plan.recipe, os.environ)
    chosen = {name: {"value": int(value), "why": why} for name, value in settings.items() if name in (IDLE, CYCLE)}
    return replace(plan, settings=settings | {CHOSEN: json.dumps(chosen)})


def choose(speeds: Mapping[str, list[float]]) -> tuple[str, str]:
    """Which of SETTINGS has the highest median speed, and why: the rule's unless it is surely slower."""
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    fastest = max(medians, key=lambda name: medians[name])
    best = fastest if medians[fastest] > GAIN * medians[RULE] else RULE
    table = ", ".join(f"{medians[name]:.0f} {name}" for name in speeds)
    rounds = len(next(iter(speeds.values())))
    rule = "" if best != RULE else f"; the rule's stays unless another gains {100 * (GAIN - 1):.0f} %"
    return best, f"measured before the run, images/s, medians of {rounds} short runs: {table}{rule}"


def _speed(plan: Plan, place: Path) -> float:
    """Images per second of the updates between WARMUP_STEPS and STEPS, the median of their parts."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    short = plan.recipe.model_copy(update={"checkpoint": None, "log_every": PART, "tensorboard": False, "tune": "rule"})
    write_atomic(place / "config.yaml", schema.dump(short))
    lines = place / "metrics.jsonl"

    def look() -> None:
        if len(_parts(lines)) >= (STEPS - WARMUP_STEPS) // PART:
            raise _Enough

    with contextlib.suppress(_Enough):
        launch(plan, place / "config.yaml", ["--out", str(place)], place / "logs", look)
    parts = _parts(lines)
    return statistics.median(parts) if parts else 0.0


def _parts(path: Path) -> list[float]:
    """Speeds of the logged parts behind the warm-up."""
    try:
        texts = path.read_text().splitlines()
    except OSError:
        return []
    found = []
    for text in texts:
        try:
            line = MetricLine.model_validate_json(text)
        except ValidationError:
            continue  # still being written
        if line.step > WARMUP_STEPS and not line.ends_epoch:
            found.append(line.images_per_second)
    return found
