"""The stages of a model that is divided over ranks: what each has, and how long it was busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hvdkit.core import cuts
from hvdkit.results.train import PlannedStage, TrainedStage
from hvdkit.tasks.parts import block_of
from hvdkit.tasks.task import Architecture, parameter_count
from hvdkit.worker.measurement import peak_rss_mib

if TYPE_CHECKING:
    from hvdkit.core.loop import Loop
    from hvdkit.recipe.communication import Parallel
    from hvdkit.worker.setup import Setup


def planned(
    architecture: Architecture, parallel: Parallel, hosts: Sequence[str], microbatches: int = 1
) -> list[PlannedStage]:
    """The stages of a model on these hosts, one for each rank; one stage, if its layers alone are divided.

    A step has so many microbatches.
    """
    took = cuts.passes_ms(parallel, microbatches)
    stages, size, work = list[PlannedStage](), len(hosts) // parallel.pipeline, architecture.work_by_block()
    held = list[set[str]]()
    for number in range(parallel.pipeline):
        tables = [architecture]
        if parallel.pipeline > 1 and work:  # else only the script knows the blocks
            tables = [architecture.staged(parallel, run) for run in range(number, parallel.runs, parallel.pipeline)]
        shapes = [name for table in tables for name in table.parameter_shapes()]
        held.append(set(shapes))
        named = [name for name in shapes if any(word.isdigit() for word in name.split("."))]
        blocks = list(dict.fromkeys(map(block_of, named)))
        ranks = range(number * size, (number + 1) * size)
        stages.append(
            PlannedStage(
                blocks=blocks,
                parameters=sum(map(parameter_count, tables)),
                work=sum(work[block] for block in blocks) / sum(work.values()) if work else None,
                ranks=list(ranks),
                passes_ms=took and took[number],
                hosts=[hosts[rank] for rank in ranks],
            )
        )
    if parallel.chunks > 1:
        stages[0].with_last = "activations"
    elif parallel.pipeline > 1 and work and held[0] & held[-1]:
        stages[0].with_last = "gradients"
    return stages


def figures(setup: Setup, loop: Loop, state_bytes: Sequence[Mapping[str, int]], hosts: Sequence[str]) -> dict[str, Any]:
    """The fields of a TrainResult about stages; collective. `state_bytes` and `hosts` are those of all ranks."""
    pipeline, seconds = loop.session.pipeline, loop.clock.seconds
    warmup = max(0, min(setup.recipe.warmup_steps, len(seconds) - 1))  # as in `measurement.gather`
    passes = pipeline.busy if pipeline else []
    busy, took = (fmean(times[warmup:]) if times else 0.0 for times in (passes, seconds))
    rows = setup.adapter.allgather_object((busy, took, peak_rss_mib()), setup.mesh.world, name="stages")
    stages, shares = [], []
    axes, microbatches = cuts.resolved(setup.recipe, setup.architecture), cuts.passes_of(setup.recipe)
    for stage in planned(setup.architecture, axes, hosts, microbatches):
        shares.append(fmean(1 - rows[rank][0] / (rows[rank][1] or 1) for rank in stage.ranks))
        busy_ms = 1e3 * fmean(rows[rank][0] for rank in stage.ranks) if pipeline else None
        largest = max((state_bytes[rank] for rank in stage.ranks), key=lambda sizes: sum(sizes.values()))
        memory = [rows[rank][2] for rank in stage.ranks]
        own = {"busy_ms": busy_ms, "state_bytes": dict(largest), "peak_rss_mib": memory}
        stages.append(TrainedStage(**stage.model_dump(), **own))
    return {"stages": stages, "bubble": fmean(shares) if pipeline and seconds else None}
