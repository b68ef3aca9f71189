"""What a run has measured, of all its ranks: step times, throughput, memory and the use of the machine."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.core.group import Mesh
from hvdkit.core.loop import Handler, Loop, StepClock
from hvdkit.core.seam import Adapter
from hvdkit.recipe.schema import Recipe
from hvdkit.usage import NOISY, Snapshot, load_of_others, machine, pinned, started_at

_MOST_STEPS = 2000  # the most step times that a result lists


def peak_rss_mib() -> float:
    """The peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(frozen=True)
class Measurement:
    """`processes` counts the ranks measured, `samples_per_second` counts all of them together.

    `cpu_s_per_sample` is the CPU time of all ranks; None if no step was measured. `figures` holds the other fields of a
    TrainResult about time and memory.
    """

    processes: int
    samples_per_second: float
    cpu_s_per_sample: float | None
    figures: dict[str, Any]


class SinceWarmup(Handler):
    """The CPU time that this process and the machine have used since the warm-up, including evaluations."""

    def __init__(self, run: Loop) -> None:
        self._cpu = run.clock.cpu
        self._begun = Snapshot.take(self._cpu())

    def on_step_end(self, run: Loop) -> None:
        if len(run.clock.seconds) == run.recipe.warmup_steps:
            self._begun = Snapshot.take(self._cpu())

    def used(self) -> dict[str, float]:
        """Seconds by name, as `Snapshot.since` returns them."""
        return Snapshot.take(self._cpu()).since(self._begun)


def gather(
    adapter: Adapter, recipe: Recipe, mesh: Mesh, clock: StepClock, used: dict[str, float], samples: list[int]
) -> Measurement:
    """Gather the measurement of a run; collective, with the same result on every rank.

    `used` is of this rank (`SinceWarmup`), `samples` are those of all ranks in each step. When ranks train together, a
    step takes as long as on the slowest rank of that step. Independent processes do not wait for each other, so the
    slowest process counts, and its throughput is multiplied by their number. Under Local SGD ranks wait for each other
    only when they synchronize, so the rank with the longest total time counts.
    """
    steps = len(clock.seconds)
    warmup = max(0, min(recipe.warmup_steps, steps - 1))  # at least one step is measured, however short the run
    mine = {
        "seconds": clock.seconds[warmup:],
        "cpu_s": sum(clock.cpu_seconds[warmup:]),
        "rss_mib": peak_rss_mib(),
        "startup_s": None if clock.first_at is None else clock.first_at - started_at(),
        "used": used,
        "machine": machine(),
        "cores": pinned(),
    }
    rows = adapter.allgather_object(mine, mesh.world, name="measured")
    alone = len(rows) // mesh.world.size  # the number of independent training processes
    if alone > 1 or recipe.sync is not None:
        measured = np.array(max((row["seconds"] for row in rows), key=sum))
    else:
        measured = np.max([row["seconds"] for row in rows], axis=0)
    shown = np.linspace(0, len(measured) - 1, min(len(measured), _MOST_STEPS)).round().astype(int)
    counted = alone * sum(samples[warmup:])
    here = [row["used"] for row in rows if row["machine"] == rows[0]["machine"]]
    load = load_of_others(here)
    figures: dict[str, Any] = {
        "warmup_steps": warmup,
        "measured_steps": len(measured),
        **{f"step_ms_p{q}": 1e3 * float(np.percentile(measured, q)) if len(measured) else 0.0 for q in (50, 90, 99)},
        "step_ms": [round(1e3 * float(measured[step]), 2) for step in shown],
        "startup_s": max((row["startup_s"] for row in rows if row["startup_s"] is not None), default=None),
        "peak_rss_mib": max(row["rss_mib"] for row in rows),
        "load": load,
        "noisy": load > NOISY,
        "idle_cores": round((os.cpu_count() or 1) * (1 - load) / len(here), 2),
        "pinned": [row["cores"] for row in rows] if pinned() is not None else None,
    }
    return Measurement(
        processes=len(rows),
        samples_per_second=counted / float(measured.sum()) if len(measured) else 0.0,
        cpu_s_per_sample=sum(row["cpu_s"] for row in rows) / counted if counted else None,
        figures=figures,
    )
