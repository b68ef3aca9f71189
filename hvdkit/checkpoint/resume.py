"""Going on from a checkpoint: which one, whether it belongs to the recipe, and where training stands then."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.snapshots import Checkpoint, Record
from hvdkit.core.counters import Progress
from hvdkit.core.seam import Adapter, Session
from hvdkit.core.step_plan import StepPlan
from hvdkit.core.strategy import without_strategy
from hvdkit.core.topology import Topology
from hvdkit.data.batches import Dataset
from hvdkit.errors import RequestError, first_fault
from hvdkit.recipe.schema import Recipe, flat

# What may differ between a checkpoint's recipe and the one that goes on from it.
_FREE = {
    "epochs", "steps", "device", "threads", "log_every", "tensorboard", "warmup_steps", "check_ranks", "checkpoint",
    "compression", "allreduce", "recompute", "batch_size", "accumulate", "elastic", "tune",
}  # fmt: skip


def pick(place: Path, recipe: Recipe) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint in `place`, None where there is none, and a line for each later one that is damaged.

    Raises RequestError where checkpoints are there and none can be read, or the newest is of another recipe.
    """
    if place.exists() and not place.is_dir():
        raise RequestError(f"{place}: expected a folder of checkpoints, got a file; remove it")
    found, complaints = snapshots.newest(place)
    if found is None and complaints:
        hint = f"none in {place} can be used; remove it, or start again with --overwrite"
        raise RequestError("\n".join([*complaints, hint]))
    if found is not None:
        _check_same(found.record, recipe, place)
    return found, complaints


def resumed(
    adapter: Adapter,
    recipe: Recipe,
    topology: Topology,
    dataset: Dataset,
    session: Session,
    place: Path | None,
    held: Checkpoint | None = None,
) -> tuple[Progress, bool, int, dict[str, np.ndarray]]:
    """Load the state of the rank that is furthest (`held` is this rank's), or else rank 0's newest whole checkpoint.

    Returns where training stands, whether updates are counted anew since they have another size, the rank from which
    the others get the adapter's state, and, on all ranks, the rest of the state. Collective.
    Raises RequestError, the same on every rank, as `pick` does, and where the tensors do not fit.
    """
    positions = adapter.allgather_object(held and held.record.progress.position, name="held")
    furthest = max((position for position in positions if position is not None), default=None)
    root = positions.index(furthest)  # the first of those that hold it, or of all where nobody holds anything
    told: dict[str, Any] = {}
    if topology.rank == root:
        try:
            found = held or (pick(place, recipe)[0] if place else None)
            if found:
                state = without_strategy(found.state)
                session.load_state(state)
                told = {"progress": asdict(found.record.progress), "np": found.record.np, "recipe": found.record.recipe}
                told["rest"] = {name: value for name, value in found.state.items() if name not in state}
        except RequestError as error:
            told = {"error": str(error)}
    told = adapter.allgather_object(told, name="resume")[root]
    if "error" in told:
        raise RequestError(told["error"])
    if not told:
        return Progress(), False, root, {}
    progress = Progress(**told["progress"])
    before = told["recipe"]["batch_size"] * told["np"], told["recipe"]["accumulate"]
    recounted = before != (recipe.batch_size * topology.size, recipe.accumulate)
    if recounted:
        # The schedule counts in updates of the new size, the epoch in images: as many are left as the images make.
        progress.step = StepPlan(recipe, len(dataset.train), topology.size).step_at(progress.epoch, progress.images)
    return progress, recounted, root, told["rest"]


def _check_same(record: Record, recipe: Recipe, place: Path) -> None:
    try:
        before = Recipe.model_validate(record.recipe)  # a key that came later has its default
    except ValidationError as error:
        raise RequestError(f"{place}: the newest checkpoint's recipe cannot be read: {first_fault(error)}") from None
    theirs, mine = deciding(before), deciding(recipe)
    faults = [
        f"{key}: the checkpoint has {theirs.get(key, 'nothing')}, the recipe {mine.get(key, 'nothing')}"
        for key in sorted(mine.keys() | theirs.keys())
        if theirs.get(key) != mine.get(key) and not _of_another_kind(key, mine, theirs)
    ]
    if faults:
        raise RequestError(f"{place}: the newest checkpoint is of another recipe; " + "; ".join(faults))


def _of_another_kind(key: str, mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether the key differs only since its section is another thing altogether, which its name tells already."""
    name = f"{key.partition('.')[0]}.name"
    return key != name and mine.get(name) != theirs.get(name)


def deciding(recipe: Recipe) -> dict[str, Any]:
    """What decides the training, by dotted key; files may have moved, and be read by other threads."""
    elsewhere = ("data.path", "data.workers", "model.weights")
    settings = flat(recipe).items()
    return {key: value for key, value in settings if key.partition(".")[0] not in _FREE and key not in elsewhere}
