"""`hvdkit memory`: the memory that a recipe needs, by its model's table; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hvdkit import tasks
from hvdkit.adapters.capabilities import RESIDENT_SOURCE
from hvdkit.core.precision import PRECISIONS
from hvdkit.errors import LARGEST, Faults, RequestError, nearest
from hvdkit.recipe.schema import Recipe
from hvdkit.results.memory import MemoryNeed, MemoryRow
from hvdkit.results.profile import ITEM_BYTES
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.runtimes.store import unknown
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import memory, sharding
from hvdkit.tasks.task import parameter_count

_UNITS = {"mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
_MOST_RANKS = 10**9


def devices() -> dict[str, int]:
    """Bytes of memory of the devices in hvdkit's cluster files, by their names in small letters."""
    devices = (clusters.load(Path(name)).device for name in clusters.shipped())
    return {device.name.lower(): round(device.memory_mib * 2**20) for device in devices if device.memory_mib}


def run(recipe: Recipe, ranks: Sequence[int], device: str | None, framework: str) -> MemoryNeed:
    """What the recipe needs at each number of ranks and stage. Raises RequestError with all faults of the request."""
    faults, room = Faults(), None
    with faults.collected():
        room = _room(device)
    faults += [
        f"-n {number}: expected at least 1 and at most {_MOST_RANKS} ranks"
        for number in ranks
        if not 1 <= number <= _MOST_RANKS
    ]
    if framework not in FRAMEWORKS:
        faults.append(unknown("framework", framework, FRAMEWORKS))
    shape = memory.sample_shape(recipe)
    architecture = tasks.choose(recipe).architecture(shape)
    count = parameter_count(architecture)
    if not count:
        faults.append(f"{recipe.name}: only its script knows the model; expected a recipe of a ResNet or a GPT")
    faults.report()
    gpu = recipe.device != "cpu" and (device is not None or recipe.device == "gpu")
    rows = [
        _row(recipe, shape, framework, gpu, number, stage, count, room)
        for number in dict.fromkeys(ranks)
        for stage in (sharding.STAGES if number > 1 else sharding.STAGES[:1])
    ]
    notes = [] if shape else ["activations: unknown, as only the ranks know the shape of a sample"]
    need = MemoryNeed(
        recipe=recipe.name,
        model=recipe.model.name,
        parameters=count,
        batch_size=recipe.batch_size,
        precision=recipe.precision,
        recompute=recipe.recompute,
        framework=framework,
        framework_source=RESIDENT_SOURCE["gpu" if gpu else "cpu"],
        device=device,
        device_bytes=room,
        rows=rows,
        notes=notes,
    )
    need.notes += [line for number in dict.fromkeys(ranks) if room and (line := _advice(need, recipe, number))]
    return need


def _row(
    recipe: Recipe,
    shape: tuple[int, ...] | None,
    framework: str,
    gpu: bool,
    ranks: int,
    stage: sharding.Stage,
    count: int,
    room: int | None,
) -> MemoryRow:
    needs = memory.parts(recipe, shape, framework, gpu, ranks, stage)
    value = ITEM_BYTES[PRECISIONS[recipe.precision].parameters]
    once = memory.gathered_once(tasks.choose(recipe).architecture(shape))
    return MemoryRow(
        ranks=ranks,
        stage=stage,
        parts=needs,
        total_bytes=needs.total,
        sent_bytes_per_step=round(value * sharding.values_sent(count, ranks, stage, recipe.accumulate, once)),
        supported=stage in sharding.supported(framework),
        fits=None if room is None else needs.total <= room,
        largest_batch=None if room is None else memory.largest_batch(needs, recipe.batch_size, room),
    )


def _advice(need: MemoryNeed, recipe: Recipe, ranks: int) -> str:
    """The first stage that fits, or what else makes the recipe smaller."""
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    stage = need.cheapest(ranks)
    if stage is not None:
        return f"{who}: fits" + ("" if stage == "none" else f" from stage {stage} on")
    batch = max((row.largest_batch or 0) for row in need.rows if row.ranks == ranks and row.supported)
    remedies = [f"batch_size={batch} or less, with accumulate= for the same global batch"] if batch else []
    remedies += [] if recipe.recompute else ["recompute=true"]
    remedies += [] if batch else ["more ranks", "a smaller model"]
    return f"{who}: does not fit at any stage that {need.framework} has; give {', or '.join(remedies)}"


def _room(device: str | None) -> int | None:
    """The bytes of a device that is named, or of a size such as 24GiB. Raises RequestError for what is neither."""
    if device is None:
        return None
    text = device.strip().lower()
    if match := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(mib|gib|mb|gb)", text):
        size = round(float(match[1]) * _UNITS[match[2]])
        if 0 < size <= LARGEST:
            return size
    known = devices()
    if text not in known:
        raise RequestError(
            f"--device {device[:60]!r}: expected one of {', '.join(sorted(known))}, or its memory, such as 24GiB"
            f"{nearest(text, known)}"
        )
    return known[text]
