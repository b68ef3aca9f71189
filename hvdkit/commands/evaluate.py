"""A checkpoint evaluated under any framework, whichever has written it."""

from __future__ import annotations

from pathlib import Path

from hvdkit import tasks
from hvdkit.checkpoint import snapshots
from hvdkit.commands.plan import Plan, launch, of_checkpoint
from hvdkit.core.state import check_fits, model_state
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.results.evaluate import EvaluationResult, read_evaluation
from hvdkit.tasks.task import state_shapes


def plan(
    folder: Path, overrides: list[str], framework: str | None, placement: Placement, overrides_from: str = "overrides"
) -> Plan:
    """Check the checkpoint, its recipe with `overrides`, and the run. Raises RequestError.

    Without a `framework` it is the one that has written the checkpoint.
    """
    checkpoint = snapshots.read(folder)
    record = checkpoint.record
    recipe = schema.revise(
        record.recipe, f"{folder / snapshots.RECORD}: recipe", overrides, overrides_from=overrides_from
    )
    plan = of_checkpoint(recipe, record.framework, framework, placement, "evaluate")
    shapes = state_shapes(tasks.choose(recipe).architecture(plan.samples.shape if plan.samples else None))
    if shapes:  # a model of the user's own has no table
        check_fits(shapes, model_state(checkpoint.state))
    return plan


def run(plan: Plan, checkpoint_folder: Path, folder: Path, average: bool = True) -> EvaluationResult:
    """Evaluate into `folder` (absolute, there and empty), averaged weights where there are any, with `average`.

    Raises what the launcher raises.
    """
    write_atomic(folder / "config.yaml", schema.dump(plan.recipe))
    arguments = ["--evaluate", str(checkpoint_folder.absolute()), "--out", str(folder)]
    arguments += [] if average else ["--no-average"]
    launch(plan, folder / "config.yaml", arguments, folder / "logs")
    return read_evaluation(folder / "evaluate.json")
