"""The command `hvdkit submit`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli.options import Framework, Overrides, Ranks, RecipeFile
from hvdkit.defaults import FRAMEWORK, OVERRIDES_FROM
from hvdkit.errors import RequestError

SCHEDULERS = ("slurm",)


def submit(
    recipe: RecipeFile,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="the scheduler: slurm")] = "slurm",
    framework: Framework = FRAMEWORK,
    np: Ranks = 1,
    rival: Annotated[str | None, typer.Option(help="train with another method, as `hvdkit train` does")] = None,
    nodes: Annotated[int, typer.Option(help="number of machines, with as many ranks on each")] = 1,
    cpus_per_task: Annotated[int | None, typer.Option(help="cores of a rank", show_default="Slurm's")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of a machine", show_default="none")] = None,
    time: Annotated[str | None, typer.Option(help="such as 12:00:00", show_default="the partition's")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition", show_default="its default")] = None,
    account: Annotated[str | None, typer.Option(help="the account that pays", show_default="yours")] = None,
    constraint: Annotated[str | None, typer.Option(help="features that machines need", show_default="none")] = None,
    line: Annotated[
        list[str] | None, typer.Option(help="another option of sbatch, such as --line=--mail-type=END; may be repeated")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="the run's folder", show_default="runs/<recipe>-train-<time>")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="the script", show_default="beside the run")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the script and its recipe")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="hand the script to the scheduler too")] = False,
) -> None:
    """Write training as a job for a scheduler: a script, with the resolved recipe beside it."""
    from hvdkit import paths
    from hvdkit.commands import submit as submit_
    from hvdkit.commands.loading import load
    from hvdkit.launch.submission import sbatch

    if to not in SCHEDULERS:
        raise RequestError(f"--to {to}: expected {' or '.join(SCHEDULERS)}")
    checked, lines = load(recipe, overrides or [], overrides_from=OVERRIDES_FROM.get())
    for each in lines:
        typer.echo(each, err=True)
    place = run or paths.default_out(checked.name, "train")
    resources = sbatch.Resources(
        np, nodes, cpus_per_task, gpus_per_node, time, partition, account, constraint, tuple(line or ())
    )
    plan = submit_.plan(
        checked, framework, resources, rival, out or place.with_name(f"{place.name}.sbatch"), place, overwrite
    )
    number = submit_.write(plan, apply)
    typer.echo(f"written to {plan.script}, with the recipe {plan.recipe_file.name} beside it")
    if number is None:
        typer.echo(f"start it with: {shlex.join(['sbatch', str(plan.script)])}")
    else:
        log = plan.script.with_name(f"{plan.script.stem}-{number}.log")
        typer.echo(f"job {number}: its output goes to {log}, its results to {plan.run}")
