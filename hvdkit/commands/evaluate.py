"""A checkpoint evaluated under any framework, whichever has written it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from hvdkit import paths, tasks
from hvdkit.checkpoint import snapshots
from hvdkit.commands import fields
from hvdkit.commands.checked_run import CheckedRun, launch, of_checkpoint
from hvdkit.commands.request import Argument, say
from hvdkit.core.state import check_fits, model_state
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe import parallel, schema
from hvdkit.results.evaluate import EvaluationResult
from hvdkit.tasks.task import state_shapes


class EvaluateRequest(fields.StartsRanks):
    """Evaluate a checkpoint, under its own framework or another; of a run's folder the best one, else the last.

    With `average` they are the averaged weights, if the checkpoint has any.
    """

    checkpoint: fields.CheckpointFolder
    overrides: Annotated[
        list[str] | None, fields.SETTINGS, Argument("such as data.path=others", metavar="[key=value]...")
    ] = None
    framework: fields.WritersFramework = None
    np: fields.Ranks = 1
    average: fields.Average = True


def plan(
    folder: Path, overrides: list[str], framework: str | None, placement: Placement, overrides_from: str = "overrides"
) -> CheckedRun:
    """Check the checkpoint, its recipe with `overrides`, and the run. Raises RequestError.

    Without a `framework` it is the one that has written the checkpoint.
    """
    checkpoint = snapshots.read(folder)
    record = checkpoint.record
    whole = {**record.recipe, "parallel": {}}  # what each rank had of the model does not matter
    recipe = schema.revise(whole, f"{folder / snapshots.RECORD}: recipe", overrides, overrides_from=overrides_from)
    parallel.check_whole(recipe.parallel, "hvdkit evaluate")
    plan = of_checkpoint(recipe, record.framework, framework, placement, "evaluate")
    shapes = state_shapes(tasks.choose(recipe).architecture(plan.samples.shape if plan.samples else None))
    if shapes:  # a model of the user's own has no table
        check_fits(shapes, model_state(checkpoint.state))
    return plan


def run(request: EvaluateRequest) -> EvaluationResult:
    """Evaluate. Raises what the launcher raises."""
    located = snapshots.locate(paths.settled(request.checkpoint))
    checked = plan(located, request.overrides or [], request.framework, Placement.of(request), request.overrides_from)
    if request.out and paths.lies_in(located, request.out):
        raise RequestError(f"--out {request.out}: the checkpoint lies in it; choose another folder")
    target = request.out or paths.default_out(checked.recipe.name, "evaluate")
    with paths.claimed(target, request.overwrite) as folder:
        say(checked.warnings)
        write_atomic(folder / "config.yaml", schema.dump(checked.recipe))
        arguments = ["--evaluate", str(located.absolute()), "--out", str(folder)]
        launch(
            checked, folder / "config.yaml", arguments + ([] if request.average else ["--no-average"]), folder / "logs"
        )
        return EvaluationResult.read(folder / EvaluationResult.FILE)


def lines(request: EvaluateRequest, result: EvaluationResult) -> Iterator[str]:
    """The loss and the metrics."""
    yield result.line
    yield f"written to {result.folder / 'evaluate.json'}"
