"""A checkpoint evaluated under any framework, whichever has written it."""

from __future__ import annotations

from pathlib import Path

from hvdkit import config, train
from hvdkit.core import checkpoint
from hvdkit.files import write_atomic
from hvdkit.results import EvaluationResult, read_evaluation
from hvdkit.train import Plan


def plan(
    folder: Path, overrides: list[str], framework: str, np: int, launcher: str, stall_timeout_s: float = 60.0
) -> Plan:
    """Check the checkpoint, whose recipe is evaluated with `overrides`, and the run. Raises RequestError."""
    record = checkpoint.read(folder).record
    recipe = config.revise(record.recipe, f"{folder / checkpoint.RECORD}: recipe", overrides)
    recipe = recipe.model_copy(update={"elastic": None})  # how many ranks trained it does not bind these
    return train.plan(recipe, framework, np, None, launcher, stall_timeout_s)


def run(plan: Plan, checkpoint_folder: Path, folder: Path) -> EvaluationResult:
    """Evaluate into `folder` (absolute, there and empty). Raises what the launcher raises."""
    write_atomic(folder / "config.yaml", config.dump(plan.recipe))
    arguments = ["--evaluate", str(checkpoint_folder.absolute()), "--out", str(folder)]
    train.launch(plan, folder / "config.yaml", arguments, folder / "logs")
    return read_evaluation(folder / "evaluate.json")
