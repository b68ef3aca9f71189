"""A question to a checkpoint's model, which one rank answers: pictures to classify, a text to continue."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvdkit.checkpoint import snapshots
from hvdkit.commands.checked_run import CheckedRun, launch, of_checkpoint
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.results.json_files import Result

Answer = TypeVar("Answer", bound=Result)


@dataclass(frozen=True)
class Asked:
    """A checkpoint, its record and its recipe. What the model was trained from need not be there any more."""

    checkpoint: Path
    record: snapshots.CheckpointRecord
    recipe: Recipe

    @classmethod
    def of(cls, given: Path) -> Asked:
        """A checkpoint, or the best one of a run's folder. Raises RequestError if it cannot be read."""
        checkpoint = snapshots.locate(given)
        record = snapshots.read(checkpoint).record
        recipe = schema.revise(record.recipe, f"{checkpoint / snapshots.RECORD}: recipe")
        model = recipe.model
        if not isinstance(model, schema.OwnModel):
            changes = {"weights": None, "new_head": False} if isinstance(model, schema.Model) else {"weights": None}
            model = model.model_copy(update=changes)
        return cls(checkpoint.absolute(), record, recipe.model_copy(update={"model": model}))

    def plan(self, framework: str | None, **changes: Any) -> CheckedRun:
        """The run of one rank under `framework`, None for that of the checkpoint, with changes to the recipe."""
        recipe = self.recipe.model_copy(update=changes)
        return of_checkpoint(recipe, self.record.framework, framework, Placement(), "none")


def ask(plan: CheckedRun, option: str, query: dict[str, Any], kind: type[Answer], folder: Path | None) -> Answer:
    """The answer that the plan's rank, started with `option` and what is asked for, writes, a file of this `kind`.

    All files are written into `folder` (absolute, there and empty) if there is one. Raises what the launcher raises.
    """
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="hvdkit-") as scratch:
        base = Path(scratch)
        write_atomic(base / "request.json", json.dumps(query))
        write_atomic(base / "config.yaml", schema.dump(plan.recipe))
        launch(plan, base / "config.yaml", [option, str(base / "request.json"), "--out", str(base)], base / "logs")
        return kind.read(base / kind.FILE)
