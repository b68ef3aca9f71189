"""What ranks on this machine would refuse, found before any of them is started and any file is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from hvdkit import tasks
from hvdkit.baselines import registry
from hvdkit.core.group import wants_gpu
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.step_plan import StepPlan
from hvdkit.data import check_classes
from hvdkit.data.counts import Counts, check_validation
from hvdkit.errors import Faults
from hvdkit.launch.placement import Placement
from hvdkit.recipe.schema import Recipe
from hvdkit.runtimes import machine
from hvdkit.tasks.task import state_shapes

Use = Literal["train", "evaluate", "none"]  # of the data
_AMD = Path("/dev/kfd")  # the device of AMD's GPUs, which nvidia-smi does not list


def check(
    recipe: Recipe, framework: str, placement: Placement, use: Use, rival: str | None, notes: list[str]
) -> Counts | None:
    """Check device, data, batch size and initial weights; returns what is known of the data.

    `notes` gets lines about how a file of weights is read. Other machines may have other GPUs and files, so only their
    ranks check those. Raises RequestError with all faults.
    """
    if not placement.here:
        return None
    faults, samples, task = Faults(), None, tasks.choose(recipe)
    with faults.collected():
        if recipe.parallel.divides:
            task.architecture().check_parallel(recipe.parallel)
    with faults.collected():
        if recipe.device == "gpu":
            check_gpu(framework, placement.np)
    with faults.collected():
        if use != "none":
            samples = task.count()
    if samples is not None:
        with faults.collected():
            check_classes(recipe.data.name, samples.classes, int(recipe.model.classes))
    if samples is not None and use == "evaluate":
        with faults.collected():
            check_validation(samples.val)
    elif samples is not None:
        with faults.collected():
            StepPlan(recipe, samples.train, data_ranks(recipe, placement.np, rival))
        with faults.collected():
            task.check(samples.shape)
        if recipe.early_stopping and use == "train" and not task.own:
            from hvdkit.handlers.stopping import check_early_stopping  # NumPy comes with it

            with faults.collected():
                check_early_stopping(recipe.early_stopping, task, samples.val)
    with faults.collected():
        if recipe.model.weights and use == "train":
            from hvdkit.checkpoint.weights import read_fitting  # NumPy comes with it

            table = replace(
                task.architecture(samples.shape if samples else None), dtype=PRECISIONS[recipe.precision].parameters
            )
            weights = read_fitting(Path(recipe.model.weights), state_shapes(table), recipe.model.new_head, table)
            notes += weights.notes
    faults.report()
    return samples


def check_gpu(framework: str, np: int) -> None:
    """Raise RequestError if this machine has no GPU."""
    if not machine.gpus() and not _AMD.exists():
        wants_gpu("gpu", 0, np, framework)


def data_ranks(recipe: Recipe, np: int, rival: str | None) -> int:
    """How many of `np` processes train one model on different samples; with some rivals each trains its own."""
    return recipe.data_ranks(np) if rival is None or registry.RIVALS[rival].averaging else 1
