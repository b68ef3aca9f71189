"""Resuming from a checkpoint: choosing it, checking that it fits the recipe, and restoring the progress."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.snapshots import Checkpoint, CheckpointRecord
from hvdkit.core.group import Mesh
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.step_plan import Progress, StepPlan
from hvdkit.core.strategy import without_strategy
from hvdkit.data.batches import Dataset
from hvdkit.errors import RequestError, first_fault
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import OwnData, Recipe, flat
from hvdkit.tasks.own import script_sha256

# Keys that may differ between a checkpoint's recipe and the recipe that resumes from it.
_FREE = {
    "epochs", "steps", "device", "threads", "log_every", "tensorboard", "warmup_steps", "check_ranks", "checkpoint",
    "compression", "allreduce", "sharding", "recompute", "batch_size", "accumulate", "elastic", "tune",
    "early_stopping", "parallel", "max_batch_size", "accumulate_rest",
}  # fmt: skip


def pick(place: Path, recipe: Recipe) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint in `place` (None if there is none), and lines: one for each later, damaged one, and
    one for each change of the recipe that moves the learning rate.

    Raises RequestError if there are checkpoints but none can be read, or if the newest is of another recipe.
    """
    if place.exists() and not place.is_dir():
        raise RequestError(f"{place}: expected a folder of checkpoints, got a file; remove it")
    newest, complaints = snapshots.newest(place)
    if newest is None and complaints:
        hint = f"none in {place} can be used; remove it, or start again with --overwrite"
        raise RequestError("\n".join([*complaints, hint]))
    if newest is not None:
        theirs = _check_same(newest.record, recipe, place / snapshots.name_of(newest.record)).model_dump()
        complaints += _other_rate(theirs, as_found(recipe, theirs))
    return newest, complaints


def as_found(recipe: Recipe, theirs: Mapping[str, Any]) -> Recipe:
    """The recipe; where it has `batch_size: auto`, with the batch that was found for a checkpoint's recipe."""
    if not recipe.finds_batch_size:
        return recipe
    batch = {key: theirs[key] for key in ("batch_size", "accumulate")}
    return recipe.model_copy(update={**batch, "max_batch_size": None, "accumulate_rest": False})


def _pick_and_link(place: Path, recipe: Recipe) -> Checkpoint | None:
    """As `pick`, and have `last` point to it: not to a damaged one."""
    newest = pick(place, recipe)[0]
    if newest is not None:
        with suppress(OSError):  # if it cannot be written, the next checkpoint says so
            snapshots.link(place, snapshots.LAST, place / snapshots.name_of(newest.record))
    return newest


def _other_rate(theirs: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """A line for each change that moves the learning rate of the updates to come."""
    schedule, lines = recipe.schedule, []
    if schedule.decay in ("cosine", "polynomial") and theirs["epochs"] != recipe.epochs:
        lines.append(
            f"epochs: {theirs['epochs']} in the checkpoint, {recipe.epochs} now: the learning rate continues on the "
            f"{schedule.decay} over {recipe.epochs} epochs, not from where it was"
        )
    before, now = theirs["batch_size"] * theirs["accumulate"], recipe.batch_size * recipe.accumulate
    if schedule.scale == "linear" and before != now:
        lines.append(
            f"batch_size, accumulate: {before} samples a rank and update in the checkpoint, {now} now: the learning "
            f"rate is {now / before:.3g} times as high (schedule.scale: linear)"
        )
    return lines


def resumed(
    recipe: Recipe, mesh: Mesh, dataset: Dataset, session: Session, place: Path | None, held: Checkpoint | None = None
) -> tuple[Progress, bool, dict[str, np.ndarray], list[str]]:
    """Load the state of the most advanced rank (`held` is this rank's), or else rank 0's newest valid checkpoint.

    Without either, all ranks get the session's state of rank 0. Returns the progress; whether updates are recounted
    because their size, or the number of samples, has changed; the state of communication; and a line for each thing
    that is not as it was. Collective, with the same result on all ranks.
    Raises RequestError, the same on every rank, as `pick` does, and if the tensors do not fit.
    """
    positions = session.adapter.allgather_object(held and held.record.progress.position, mesh.world, name="held")
    furthest = max((position for position in positions if position is not None), default=None)
    root = positions.index(furthest)  # the first rank that holds it; rank 0 if no rank holds a state
    found_state: dict[str, Any] = {}
    state: dict[str, np.ndarray] = {}
    if mesh.topology.rank == root:
        try:
            checkpoint = held or (_pick_and_link(place, recipe) if place else None)
            if checkpoint:
                record = checkpoint.record
                check_classes(record, dataset)
                check_text(record, dataset)
                notes = [] if held else _changed_data(record, recipe, dataset, mesh) + _changed_script(record, recipe)
                state = without_strategy(checkpoint.state)
                session.load_state(state)
                found_state = {"progress": asdict(record.progress), "np": record.np, "recipe": record.recipe}
                found_state |= {"notes": notes, "samples": record.data and record.data["train"].samples}
                found_state["rest"] = {name: value for name, value in checkpoint.state.items() if name not in state}
        except RequestError as error:
            found_state = {"error": str(error)}
    found_state = session.adapter.allgather_object(found_state, mesh.world, name="resume")[root]
    if "error" in found_state:
        raise RequestError(found_state["error"])
    if not found_state:
        session.broadcast_state(mesh.data)
        return Progress(), False, {}, []
    session.broadcast_state(mesh.world, root, state)
    progress = Progress(**found_state["progress"])
    recounted = recounts(found_state["recipe"], found_state["np"], recipe, mesh.data.size)
    if dataset.fingerprints and found_state["samples"] is not None:
        recounted = recounted or dataset.fingerprints["train"].samples != found_state["samples"]
    if recounted:
        # The schedule counts updates of the new size. The samples of the epoch decide how many updates are left.
        plan = StepPlan(recipe, len(dataset.train), mesh.data.size)
        progress.step = plan.step_at(progress.epoch, progress.samples)
    return progress, recounted, found_state["rest"], found_state["notes"]


def recounts(theirs: Mapping[str, Any], np: int, recipe: Recipe, size: int) -> bool:
    """Whether updates of the recipe on `size` ranks have another size than those of the checkpoint's recipe on `np`."""
    before, recipe = Recipe.model_construct(**theirs), as_found(recipe, theirs)  # it was checked when it was written
    ranks = max(1, np // Parallel.model_validate(theirs.get("parallel", {})).model)
    sizes = before.batch_size * ranks, recipe.batch_size * size
    return sizes[0] != sizes[1] or before.accumulate != recipe.accumulate


def check_classes(record: CheckpointRecord, dataset: Dataset) -> None:
    """Raise RequestError if the data set has other classes than the checkpoint, whose labels are their numbers."""
    if record.preprocessing is None or dataset.preprocessing is None:
        return
    theirs = tuple(unicodedata.normalize("NFC", name) for name in record.preprocessing.class_names)  # as a folder's are
    mine = dataset.preprocessing.class_names
    if theirs != mine:
        shown = [", ".join(names[:8]) + (", …" if len(names) > 8 else "") for names in (theirs, mine)]
        raise RequestError(f"data: expected the checkpoint's classes ({shown[0]}), got {shown[1]}")


def check_text(record: CheckpointRecord, dataset: Dataset) -> None:
    """Raise RequestError if the text is not the one that the checkpoint was trained on, wherever it lies."""
    theirs, mine = record.text_sha256, dataset.text_sha256
    if theirs and mine and theirs != mine:
        raise RequestError(
            f"data.path: expected the text that the checkpoint was trained on, SHA-256 {theirs[:12]}…, got "
            f"{mine[:12]}…; give that text, start again with --overwrite, or train on from model.weights"
        )


def _changed_data(record: CheckpointRecord, recipe: Recipe, dataset: Dataset, mesh: Mesh) -> list[str]:
    """A line if the samples are not those of the checkpoint. Raises RequestError unless the recipe accepts that."""
    if isinstance(recipe.data, OwnData) and recipe.data.shares and record.np != mesh.world.size:
        raise RequestError(
            f"-np: expected {record.np} ranks, as each of the checkpoint's has trained on a share of its own "
            f"(data.shares), got {mesh.world.size}"
        )
    changes = []
    for name, what in (("train", "training"), ("val", "validation")):
        theirs, mine = ((fingerprints or {}).get(name) for fingerprints in (record.data, dataset.fingerprints))
        if theirs is None or mine is None:
            continue
        changed = theirs.other(mine)
        if changed == "number":
            changes.append(f"{theirs.samples} {what} samples are now {mine.samples}")
        elif changed:
            changes.append(f"the {changed} of the {mine.samples} {what} samples are others")
    if not changes:
        return []
    line = f"data: not those of the checkpoint: {', '.join(changes)}"
    if recipe.checkpoint and recipe.checkpoint.accept_changed_data:
        return [f"{line}; accepted (checkpoint.accept_changed_data)"]
    raise RequestError(
        f"{line}; samples that were held out may be trained on, and the order of the others changes: give the data as "
        "they were, start again with --overwrite, or accept it with checkpoint.accept_changed_data=true"
    )


def _changed_script(record: CheckpointRecord, recipe: Recipe) -> list[str]:
    theirs, mine = record.script_sha256, script_sha256(recipe)
    if not theirs or not mine or theirs == mine:
        return []
    return [f"model.script: the file has changed since the checkpoint: SHA-256 {theirs[:12]}… is now {mine[:12]}…"]


def _check_same(record: CheckpointRecord, recipe: Recipe, place: Path) -> Recipe:
    """The checkpoint's recipe. Raises RequestError if it is another one, or cannot be read."""
    try:
        before = Recipe.model_validate(record.recipe)  # a key added in a later version has its default
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
    return before


def _of_another_kind(key: str, mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether a key differs only because its section has another `name`, which is reported already."""
    name = f"{key.partition('.')[0]}.name"
    return key != name and mine.get(name) != theirs.get(name)


def deciding(recipe: Recipe) -> dict[str, Any]:
    """The settings that determine training, by dotted key; without paths of files and numbers of reader threads."""
    elsewhere = ("data.path", "data.workers", "model.weights", "model.script")
    settings = flat(recipe).items()
    return {key: value for key, value in settings if key.partition(".")[0] not in _FREE and key not in elsewhere}


def last_record(folder: Path) -> CheckpointRecord | None:
    """The record of the newest checkpoint in `folder` whose record can be read; None if there is none."""
    for place in reversed(snapshots.places(folder)):
        with suppress(RequestError):
            return snapshots.read_record(place)
    return None


def check_fresh(adapter: Adapter, mesh: Mesh, place: Path) -> None:
    """Check that `place` has no checkpoints of an earlier run, because a new run's would mix with them; collective.

    Raises RequestError, the same on every rank. `hvdkit train` empties the folder before; a recipe's script does not.
    """
    is_used = mesh.is_root and any(place.glob("step-*"))
    if adapter.allgather_object(is_used, mesh.world, name="fresh")[0]:
        raise RequestError(
            f"{place}: it holds the checkpoints of an earlier run; add --resume to continue from them, remove it, or "
            "choose another --out"
        )
