"""The stages of a model that is divided over ranks: what each has, and how long it was busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdkit.core.loop import Loop
from hvdkit.recipe.communication import Parallel
from hvdkit.results.train import Stage, TrainedStage
from hvdkit.tasks.parts import block_of
from hvdkit.tasks.task import Architecture, parameter_count
from hvdkit.worker.setup import Setup


def planned(architecture: Architecture, parallel: Parallel, np: int) -> list[Stage]:
    """The stages of a model on so many ranks; one, if its layers alone are divided."""
    stages, size = [], np // parallel.pipeline
    for number in range(parallel.pipeline):
        table = architecture.staged(parallel, number) if parallel.pipeline > 1 else architecture
        named = [name for name in table.parameter_shapes() if any(word.isdigit() for word in name.split("."))]
        blocks, ranks = list(dict.fromkeys(map(block_of, named))), list(range(number * size, (number + 1) * size))
        stages.append(Stage(blocks=blocks, parameters=parameter_count(table), ranks=ranks))
    return stages


def figures(setup: Setup, loop: Loop, state_bytes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """The fields of a TrainResult about stages; collective. `state_bytes` are those of all ranks."""
    pipeline, seconds = loop.session.pipeline, loop.clock.seconds
    warmup = max(0, min(setup.recipe.warmup_steps, len(seconds) - 1))  # as in `measurement.gather`
    passes = pipeline.busy if pipeline else []
    mine = [float(np.mean(times[warmup:])) if times else 0.0 for times in (passes, seconds)]
    rows = setup.adapter.allgather_object(mine, setup.mesh.world, name="stages")
    stages, shares = [], []
    for stage in planned(setup.architecture, setup.recipe.parallel, len(rows)):
        shares.append(float(np.mean([1 - rows[rank][0] / (rows[rank][1] or 1) for rank in stage.ranks])))
        busy_ms = 1e3 * float(np.mean([rows[rank][0] for rank in stage.ranks])) if pipeline else None
        largest = max((state_bytes[rank] for rank in stage.ranks), key=lambda sizes: sum(sizes.values()))
        stages.append(TrainedStage(**stage.model_dump(), busy_ms=busy_ms, state_bytes=dict(largest)))
    return {"stages": stages, "bubble": float(np.mean(shares)) if pipeline and seconds else None}
