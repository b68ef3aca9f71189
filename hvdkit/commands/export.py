"""A checkpoint's model as one file for others: safetensors in torchvision's layout, or a Keras archive."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hvdkit import paths
from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.weights import save_weights
from hvdkit.commands.plan import Plan, launch, make_plan
from hvdkit.errors import Faults, HvdkitError, RequestError
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema

SAFETENSORS = ".safetensors"
_WRITTEN_BY = {".keras": "keras"}  # archives of a framework's own, by `recipes/<framework>/export.py` in its runtime


@dataclass(frozen=True)
class ExportPlan:
    """An export that has passed every check that can be made before it starts; `plan` where a runtime has to write."""

    folder: Path
    out: Path
    plan: Plan | None


def plan(folder: Path, out: Path, overwrite: bool) -> ExportPlan:
    """Check the checkpoint, the file's name, its place and its runtime. Raises RequestError with all faults."""
    faults = Faults()
    suffixes = (SAFETENSORS, *_WRITTEN_BY)
    if out.suffix not in suffixes or not out.stem:
        faults.append(f"--out {out}: expected a file that ends in {' or '.join(suffixes)}")
    if not os.access(out.parent, os.W_OK | os.X_OK) or not out.parent.is_dir():
        faults.append(f"--out {out}: {out.parent} is no folder that can be written; make it, or choose another")
    elif out.is_dir():
        faults.append(f"--out {out}: expected a file, got a folder")
    elif out.exists() and not overwrite:
        faults.append(f"--out {out}: the file exists; add --overwrite or choose another one")
    ready = None
    with faults.collected(HvdkitError):
        record = snapshots.read(folder).record
        if out.suffix in _WRITTEN_BY:
            recipe = schema.revise(record.recipe, f"{folder / snapshots.RECORD}: recipe")
            if recipe.model.name == "own":
                raise RequestError(f"--out {out}: expected {SAFETENSORS}, the only file for a model of your own")
            recipe = recipe.model_copy(update={"elastic": None})  # one rank writes, whatever trained it
            ready = make_plan(recipe, _WRITTEN_BY[out.suffix], Placement(), use="none")
    faults.report()
    return ExportPlan(folder.absolute(), out.absolute(), ready)


def run(plan: ExportPlan) -> int:
    """Write the file, whole or not at all; returns its size in bytes.

    Raises RunError where it cannot be written, and what the launcher raises.
    """
    if plan.plan is None:
        save_weights(snapshots.read(plan.folder).state, plan.out)
        return plan.out.stat().st_size
    script = paths.recipes() / plan.plan.framework / "export.py"
    with tempfile.TemporaryDirectory() as scratch:
        recipe, making = Path(scratch) / "config.yaml", Path(scratch) / plan.out.name
        write_atomic(recipe, schema.dump(plan.plan.recipe))
        launch(plan.plan.by(script), recipe, [str(plan.folder), str(making)], Path(scratch) / "logs")
        write_atomic(plan.out, making.read_bytes())
    return plan.out.stat().st_size
