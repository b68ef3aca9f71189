"""Steps of each stage of sharding beside what `hvdkit predict` says of them, from a profile without sharding.

`sharding.py` calls this. The collectives are those of `hvdkit bench`, by the same framework on as many ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness
from hvdkit.results.profile import load as load_profile
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import sharding
from hvdkit.simulator.calibration import calibrate
from hvdkit.simulator.predict import point
from hvdkit.simulator.settings import Settings

COLLECTIVES = ("allreduce", "reducescatter", "allgather")
STEPS, PROFILES, SMALLEST = 24, 3, 4096


def measure(framework: str, recipe: str, keys: Sequence[str], ranks: int, folder: Path) -> None:
    """Profile the recipe without sharding, and time the collectives, unless that is done."""
    where = ["--framework", framework, "-np", str(ranks), "--overwrite"]
    for place in profiles(folder):
        if not (place / "profile.json").exists():
            out = ["--out", str(place), "--steps", str(STEPS)]
            harness.hvdkit(["profile", recipe, *where, *out, *keys, "sharding=none"], 300.0)
    for before, collective in zip((None, *COLLECTIVES), COLLECTIVES, strict=False):
        if not (folder / collective / "bench.json").exists():
            adds = ["--add-to", str(folder / before / "cluster.yaml")] if before else []
            out = ["--out", str(folder / collective), "--min-bytes", str(SMALLEST), "--seconds", "1"]
            harness.hvdkit(["bench", collective, *where, *out, *adds], 300.0)


def profiles(folder: Path) -> list[Path]:
    """Where the profiles are kept."""
    return [folder / f"profile-{number}" for number in range(PROFILES)]


def rows(framework: str, ranks: int, turns_ms: Sequence[Mapping[str, float]], folder: Path) -> list[dict[str, Any]]:
    """A row for each stage that took turns, `turns_ms` by round: milliseconds a step, and relative to no sharding."""
    # Of several profiles the one with the median step, as the machine is not equally fast each minute.
    loaded = [load_profile(place / "profile.json") for place in profiles(folder)]
    loaded.sort(key=lambda each: each.step.step_ms.mean)
    found = calibrate(loaded[len(loaded) // 2])
    cluster = clusters.load(folder / COLLECTIVES[-1] / "cluster.yaml")
    stages = [stage for stage in sharding.STAGES if stage in turns_ms[0]]
    points = {stage: point(found, cluster, ranks, Settings(sharding=stage)) for stage in stages}
    made = []
    for stage, each in points.items():
        step, ratio = median(turn[stage] for turn in turns_ms), median(turn[stage] / turn["none"] for turn in turns_ms)
        foreseen = each.step_ms / points["none"].step_ms
        made.append(
            {
                "framework": framework,
                "ranks": ranks,
                "stage": stage,
                "step_ms": step,
                "predicted_ms": each.step_ms,
                "low_ms": each.low_ms,
                "high_ms": each.high_ms,
                "error_percent": 100 * (each.step_ms / step - 1),
                "ratio": ratio,
                "predicted_ratio": foreseen,
                "ratio_error_percent": 100 * (foreseen / ratio - 1),
            }
        )
    return made
