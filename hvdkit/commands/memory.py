"""`hvdkit memory`: the memory that a recipe needs, by its model's table; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Table

from hvdkit import tasks
from hvdkit.adapters.capabilities import CAPABILITIES, RESIDENT_SOURCE, dividing
from hvdkit.commands.fields import Framework, MayWrite, Overrides, RecipeFile
from hvdkit.commands.loading import loaded
from hvdkit.commands.request import Option
from hvdkit.core.precision import PRECISIONS
from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import LARGEST, Faults, RequestError, nearest
from hvdkit.recipe import parallel
from hvdkit.recipe.schema import Recipe
from hvdkit.report import memory as report
from hvdkit.report.tabular import terminal
from hvdkit.results.memory import MemoryNeed, MemoryRow
from hvdkit.results.profile import ITEM_BYTES
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.runtimes.store import unknown
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import memory, sharding
from hvdkit.tasks.task import NOT_COUNTED, parameter_count

_UNITS = {"mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
_MOST_RANKS = 10**9


class MemoryRequest(MayWrite):
    """Count the memory that a recipe needs at each number of ranks and stage of sharding; nothing is started.

    `device` is a GPU's name, such as `h100`, or its memory, such as `24GiB`. Without `out` nothing is written.
    """

    recipe: RecipeFile
    overrides: Overrides = None
    ranks: Annotated[list[int] | None, Option("number of ranks; may be repeated", ("-n", "-np", "--np"), shown="1")] = (
        None
    )
    device: Annotated[
        str | None,
        Option(
            "whether it fits: a GPU such as h100, or its memory such as 24GiB",
            shown="none",
        ),
    ] = None
    framework: Framework = FRAMEWORK


def run(request: MemoryRequest) -> MemoryNeed:
    """Count, and write memory.json where that is asked for."""
    recipe = loaded(request)
    axes = recipe.parallel
    fewest = axes.model * (1 if axes.data == "auto" else axes.data)
    needs = need(recipe, request.ranks or [fewest], request.device, request.framework)
    with request.claimed() as folder:
        return needs.written(folder) if folder else needs


def lines(request: MemoryRequest, result: MemoryNeed) -> Iterator[str | Table]:
    """A table for each number of ranks."""
    yield report.title(result)
    yield from (terminal(table, "") for table in report.tables(result))
    yield from report.notes(result)
    if request.out:
        yield f"written to {result.folder / result.FILE}"


def devices() -> dict[str, clusters.Device]:
    """The devices in hvdkit's cluster files whose memory is known, by their names in small letters."""
    devices = (clusters.load(Path(name)).device for name in clusters.shipped())
    return {device.name.lower(): device for device in devices if device.memory_mib}


def need(recipe: Recipe, ranks: Sequence[int], device: str | None, framework: str) -> MemoryNeed:
    """What the recipe needs at each number of ranks and stage. Raises RequestError with all faults of the request."""
    faults, device_bytes = Faults(), None
    with faults.collected():
        device_bytes = bytes_of(device)
    faults += [
        f"-n {number}: expected at least 1 and at most {_MOST_RANKS} ranks"
        for number in ranks
        if not 1 <= number <= _MOST_RANKS
    ]
    if framework not in FRAMEWORKS:
        faults.append(unknown("framework", framework, FRAMEWORKS))
    axes, shape = recipe.parallel, memory.sample_shape(recipe)
    architecture = tasks.choose(recipe).architecture(shape)
    for number in dict.fromkeys(ranks) if axes.divides else ():
        with faults.collected():
            parallel.check_ranks(axes, number)
    with faults.collected():
        architecture.check_parallel(axes)
    count = parameter_count(architecture)
    if not count:
        faults.append(f"{recipe.name}: {NOT_COUNTED}")
    faults.report()
    gpu = recipe.device != "cpu" and (device is not None or recipe.device == "gpu")
    room = None if device_bytes is None else memory.usable(device_bytes, gpu)
    value, once = ITEM_BYTES[PRECISIONS[recipe.precision].parameters], memory.gathered_once(architecture)
    divides = set(dividing(recipe).values())
    rows = []
    for number, stage in ((one, stage) for one in dict.fromkeys(ranks) for stage in sharding.STAGES):
        data = recipe.data_ranks(number)
        if stage != "none" and (number == 1 or axes.divides):
            continue
        size = number // axes.pipeline
        for at in range(axes.pipeline):
            parts = memory.parts_of_stage(recipe, shape, framework, gpu, data, stage, at)
            sent = value * sharding.values_sent(count, data, stage, recipe.accumulate, once)
            largest = None if room is None else memory.largest_batch(parts, recipe.batch_size, room)
            if largest and axes.pipeline > 1:
                largest -= largest % parallel.microbatches_of(axes, recipe.batch_size)
            rows.append(
                MemoryRow(
                    ranks=number,
                    stage=stage,
                    held_by=list(range(at * size, (at + 1) * size)) if axes.divides else None,
                    parts=parts,
                    total_bytes=parts.total,
                    sent_bytes_per_step=None if axes.divides else round(sent),
                    supported=stage in sharding.supported(framework) and divides <= CAPABILITIES[framework],
                    fits=None if room is None else parts.total <= room,
                    largest_batch=largest,
                )
            )
    notes = [] if shape else ["activations: unknown, as only the ranks know the shape of a sample"]
    notes += [] if gpu else [memory.ON_CPUS]
    needs = MemoryNeed(
        recipe=recipe.name,
        model=recipe.model.name,
        parameters=count,
        batch_size=recipe.batch_size,
        precision=recipe.precision,
        recompute=recipe.recompute,
        framework=framework,
        framework_source=RESIDENT_SOURCE["gpu" if gpu else "cpu"],
        device=device,
        device_bytes=device_bytes,
        room_bytes=room,
        rows=rows,
        notes=notes,
    )
    needs.notes += [line for number in dict.fromkeys(ranks) if room and (line := _advice(needs, recipe, number))]
    return needs


def _advice(need: MemoryNeed, recipe: Recipe, ranks: int) -> str:
    """The first stage that fits, or what else makes the recipe smaller."""
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if recipe.parallel.divides:
        mine = [row for row in need.rows if row.ranks == ranks]
        full = [f"stage {number}" for number, row in enumerate(mine) if not row.fits]
        return f"{who}: fits" if not full else f"{who}: {', '.join(full)} of {len(mine)} do not fit"
    stage = need.cheapest(ranks)
    if stage is not None:
        return f"{who}: fits" + ("" if stage == "none" else f" from stage {stage} on")
    batch = max((row.largest_batch or 0) for row in need.rows if row.ranks == ranks and row.supported)
    remedies = [f"batch_size={batch} or less, with accumulate= for the same global batch"] if batch else []
    remedies += [] if recipe.recompute else ["recompute=true"]
    remedies += [] if batch else ["more ranks", "a smaller model"]
    return f"{who}: does not fit at any stage that {need.framework} has; give {', or '.join(remedies)}"


def bytes_of(device: str | None) -> int | None:
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
    return known[text].bytes or 0
