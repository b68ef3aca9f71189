"""`hvdkit submit`: training as a job for a scheduler."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.baselines import registry
from hvdkit.errors import Faults, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.launch.submission import sbatch
from hvdkit.launch.submission.sbatch import Resources
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe


@dataclass(frozen=True)
class Submission:
    """A job that has passed every check that can be made before the scheduler sees it.

    `script` is the file that the scheduler gets, `recipe_file` the resolved recipe beside it, `run` the run's folder.
    """

    recipe: Recipe
    text: str
    script: Path
    recipe_file: Path
    run: Path


def plan(
    recipe: Recipe, framework: str, resources: Resources, rival: str | None, script: Path, run: Path, overwrite: bool
) -> Submission:
    """Check a request. Raises RequestError with all its faults."""
    faults = Faults()
    if framework not in CAPABILITIES:
        faults.append(f"unknown framework {framework!r}; expected one of {', '.join(CAPABILITIES)}")
    elif rival is not None:
        faults += registry.check([rival], [framework], [resources.tasks])
    if resources.tasks < 1:
        faults.append(f"-np {resources.tasks}: expected a whole number of ranks, 1 or more")
    if recipe.elastic:
        faults.append("elastic: expected a recipe without it; the number of a Slurm job's tasks does not change")
    if recipe.checkpoint is None:
        faults.append("checkpoint: expected one; without it a job that is queued again begins anew")
    faults += resources.faults()
    script, run = script.absolute(), run.absolute()
    recipe_file = script.with_suffix(".yaml")
    if script.suffix == ".yaml":
        faults.append(f"--out {script}: expected a name such as job.sbatch; the recipe is written to {recipe_file}")
    for path in (script, recipe_file):
        if path.exists() and not overwrite:
            faults.append(f"--out: {path} exists; give --overwrite, or another name")
    if "\n" in f"{script}{run}":
        faults.append("--out, --run: expected no line break in a name")
    faults.report()
    command = [
        sys.executable, "-m", "hvdkit", "train", str(recipe_file), "--framework", framework, "-np",
        str(resources.tasks), "--launcher", "slurm", "--out", str(run), "--resume",
        *(["--rival", rival] if rival else []),
    ]  # fmt: skip
    log = script.with_name(f"{script.stem}-%j.log")
    return Submission(recipe, sbatch.script(resources, recipe.name, command, run, log), script, recipe_file, run)


def write(submission: Submission, apply: bool = False) -> str | None:
    """Write the script and the recipe, and with `apply` hand the script to Slurm; returns the job's number then.

    Raises RequestError where a file cannot be written or Slurm refuses the job; the files are then as they were.
    """
    files = {submission.recipe_file: schema.dump(submission.recipe), submission.script: submission.text}
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    made = [folder for folder in submission.script.parents if not folder.exists()]
    try:
        for path, text in files.items():
            _write(path, text)
        return sbatch.submit(submission.script) if apply else None
    except RequestError:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, content)
        for folder in made:
            with contextlib.suppress(OSError):  # not made, or not empty
                folder.rmdir()
        raise


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise RequestError(f"--out {path}: cannot be written ({error.strerror})") from None
    except RunError as error:
        raise RequestError(f"--out: {error}") from None
