"""The step of a recipe whose model ranks divide, from the profile of a rank that has all of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hvdkit import tasks
from hvdkit.core import cuts
from hvdkit.errors import RequestError
from hvdkit.recipe.parallel import check_ranks, microbatches_of
from hvdkit.recipe.schema import Recipe, revise
from hvdkit.results.memory import Parts
from hvdkit.results.profile import Profile
from hvdkit.simulator import case_memory, chains, memory, meshes
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.meshes import Divided, MeshLinks, MeshStep, ModelWork, Processor
from hvdkit.simulator.settings import Settings

ERROR_PERCENT = 17.0  # 9 of 10 of the published steps lie within it (benchmarks/mesh_rows.py)


def recipe_of(profile: Profile, settings: Settings) -> Recipe:
    """The profile's recipe on the mesh of the settings; of a published figure, that of its model.

    Raises RequestError where there is none, for a mesh that the model cannot take, and for other settings that change
    what ranks do.
    """
    assert settings.parallel
    changed = settings.model_dump(
        exclude_defaults=True,
        exclude={"parallel", "batch_size", "sharding", "speed", "link", "accumulate", "recompute"},
    )
    if changed:
        raise RequestError(f"--set {min(changed)}: expected none together with parallel, got {changed[min(changed)]}")
    keys: dict[str, Any] = {"parallel": settings.parallel.model_dump()}
    same = ("batch_size", "sharding", "recompute")
    keys |= {key: value for key in same if (value := getattr(settings, key)) is not None}
    keys["accumulate"] = settings.accumulate * profile.accumulate
    known = case_memory.recipe_of(profile) if profile.published else None
    if profile.published and known is None:
        raise RequestError(f"--set parallel: expected a profile of a ResNet or a GPT, got one of {profile.model}")
    recipe = revise((known.model_dump() if known else profile.settings) | keys, "the profile's recipe")
    tasks.choose(recipe).architecture(memory.sample_shape(recipe)).check_parallel(recipe.parallel)
    return recipe


def divided(
    fitted: Calibration, profiled: Mapping[str, Any], recipe: Recipe, cluster: Cluster, ranks: int, speed: float = 1.0
) -> Divided | None:
    """A recipe on `ranks` ranks whose devices are `speed` times as fast as the profile's; None if its samples, or what
    its model computes, are unknown. `profiled` are values of the profile's recipe, by dotted key.

    Raises RequestError if the axes are not those of so many ranks.
    """
    check_ranks(recipe.parallel, ranks)
    shape, work = memory.sample_shape(recipe), fitted.workload
    chain = chains.of_recipe(recipe, shape)
    if chain is None:
        return None
    table = tasks.choose(recipe).architecture(shape)
    axes = cuts.resolved(recipe, table)
    split = axes.split if axes.pipeline > 1 else [len(chain.blocks)]
    seconds = work.compute_s * (0.75 if profiled.get("recompute") else 1.0)
    device = _device(chain, work.batch_size, seconds, cluster, fitted.on_cpu)
    device = replace(device, flop_per_s=device.flop_per_s * speed)
    parameters = sum(block.parameters + block.whole_parameters for block in chain.blocks) - chain.shared
    chain = replace(chain, update_bytes=work.update_s / speed * device.memory_bytes_per_s / parameters)
    microbatches = microbatches_of(axes, recipe.batch_size) if axes.pipeline > 1 else 1
    return Divided(
        chain,
        axes.model_copy(update={"data": recipe.data_ranks(ranks), "split": split}),
        microbatches * recipe.accumulate,
        recipe.batch_size // microbatches,
        device,
        MeshLinks(cluster),
        recipe.recompute,
        recipe.sharding == "optimizer",
        work.serial_s,
    )


def interval(fitted: Calibration, step: MeshStep) -> tuple[float, float]:
    """The shortest and the longest step, by what predictions of published steps were off, and by the profile's own."""
    error = (ERROR_PERCENT + fitted.error_percent) / 100
    return step.seconds / (1 + error), step.seconds * (1 + error)


def memory_of(recipe: Recipe, framework: str, gpu: bool, ranks: int) -> list[Parts]:
    """What the ranks of each stage keep."""
    shape, data = memory.sample_shape(recipe), recipe.data_ranks(ranks)
    return [
        memory.parts_of_stage(recipe, shape, framework, gpu, data, recipe.sharding, stage)
        for stage in range(recipe.parallel.pipeline)
    ]


def _device(chain: ModelWork, samples: float, seconds: float, cluster: Cluster, on_cpu: bool) -> Processor:
    """The device of a profile, by its forward and backward of all blocks.

    A CPU's memory and launches are not known apart from its arithmetic; nor are a device's that takes less than them.
    """
    device, count = cluster.device, max(1, round(samples))
    if not on_cpu:
        with suppress(ValueError):
            return meshes.calibrated(chain, count, seconds, device.memory_bytes_per_s, 1e-6 * device.launch_us)
    return meshes.calibrated(chain, count, max(seconds, 1e-9), 1e30, 0.0)
