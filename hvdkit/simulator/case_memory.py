"""The memory of a rank in a what-if: from the device's measured peak, else from the model's table, as `hvdkit memory`.

The table is asked where the profile is of a recipe or a model that hvdkit has, and the cluster says how much memory its
devices have. What a published figure was trained in is not known: where its own batch would not fit in fp32, it is
taken to be mixed precision.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit.errors import RequestError
from hvdkit.profiling import published_models
from hvdkit.recipe import registry, schema
from hvdkit.recipe.schema import Recipe
from hvdkit.results.memory import Parts, Stage
from hvdkit.results.profile import Profile
from hvdkit.simulator import memory, sharding
from hvdkit.simulator.case import Case
from hvdkit.simulator.workload import Workload
from hvdkit.tasks import gpt, resnet


class Need(NamedTuple):
    """Bytes of a rank: all, those that grow with the batch, and by part, None if only their sum is known."""

    total: float
    of_batch: float
    parts: dict[str, float] | None


def recipe_of(profile: Profile) -> Recipe | None:
    """The recipe of a profile, with as many batches as were profiled; None where it is none that hvdkit knows."""
    settings: dict[str, Any] = profile.settings
    try:
        if not profile.published:
            return schema.revise(settings, "the profile")
        name = "gpt2" if profile.model in gpt.NAMES else "resnet50-synthetic"
        size = [f"model.name={profile.model}", f"batch_size={profile.batch_size}", "accumulate=1", "precision=fp32"]
        if profile.model in resnet.NAMES:
            side = resnet.architecture(profile.model, 2).usual_side
            size += [f"data.height={side}", f"data.width={side}"]
        return schema.load(registry.locate(Path(name)), size)
    except RequestError:
        return None


def shape_of(profile: Profile, recipe: Recipe | None) -> tuple[int, ...] | None:
    """Of a sample; None if it is unknown. A window of text may be shorter than the recipe's model takes."""
    if profile.unit == "tokens":
        return (profile.units_per_sample,)
    known = published_models.MODELS.get(profile.model)
    if recipe is None:
        return (known.size, known.size, 3) if known else None
    return memory.sample_shape(recipe)


def need(case: Case) -> Need | None:
    """What a rank of the case needs; None if that is unknown."""
    work, room = case.workload, room_bytes(case)
    if work.recipe and room is not None and not work.state_bytes.total:
        given, precision = work.given or work, work.recipe.precision
        for way in ("fp32", "fp16") if work.published and work.precision == given.precision else ():
            precision = way
            if _counted(given, 1, "none", precision).total <= room:
                break
        counted = _counted(work, case.data_ranks, case.stage, precision, case.accumulate)
        of_batch = ((counted.activations or 0) + (counted.batch or 0)) * case.batch
        parts = {name: float(value) for name, value in counted if value}
        parts |= {name: parts[name] * case.batch for name in ("activations", "batch") if name in parts}
        return Need(sum(parts.values()), of_batch, parts)
    if not work.fixed_memory_bytes:
        return None
    of_batch, buffers = work.activation_bytes * case.batch, _buffers(case)
    held = sharding.held_of(work.state_bytes, [tensor.shape for tensor in work.tensors], case.data_ranks, case.stage)
    total = work.fixed_memory_bytes - work.state_bytes.total + held.total + buffers + of_batch
    if not work.state_bytes.total:
        return Need(total, of_batch, None)
    kept = {name: float(getattr(held, name)) for name in ("parameters", "gradients", "optimizer")}
    return Need(total, of_batch, kept | {"communication": buffers, "activations": of_batch})


def room_bytes(case: Case) -> float | None:
    """What of its device's memory a rank may fill; None if it is unknown."""
    mib = case.network.cluster.device.memory_mib
    return None if mib is None else memory.usable(round(mib * 2**20), gpu=True)


def fits(case: Case) -> bool:
    """Whether the device has the memory, or that is unknown."""
    needed, room = need(case), room_bytes(case)
    return needed is None or room is None or not needed.of_batch or needed.total <= room


def largest_batch(case: Case) -> int | None:
    """The most samples of an update of a rank that fit; 0: none do; None if that is unknown."""
    needed, room = need(case), room_bytes(case)
    if needed is None or room is None or not needed.of_batch:
        return None
    size = case.batch * case.workload.batch_size
    return max(0, int((room - needed.total + needed.of_batch) / needed.of_batch * size + 1e-9))


@lru_cache(maxsize=1024)
def _counted(work: Workload, ranks: int, stage: Stage, precision: str, accumulate: int = 1) -> Parts:
    """By the model's table, at the profile's own batch size."""
    assert work.recipe is not None
    recipe = work.recipe.model_copy(update={"precision": precision, "accumulate": work.recipe.accumulate * accumulate})
    return memory.parts(recipe, work.shape, memory.framework_of(work.framework), True, ranks, stage)


def _buffers(case: Case) -> float:
    """Bytes of the fusion buffer."""
    return case.threshold_bytes if case.rules.fuses and case.data_ranks > 1 else 0.0
