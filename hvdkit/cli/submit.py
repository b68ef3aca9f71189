"""The command `hvdkit submit`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli.options import Framework, Overrides, Ranks, RecipeFile
from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import RequestError

_SLURM, _KUBERNETES = "Slurm", "Kubernetes"


def submit(
    ctx: typer.Context,
    recipe: RecipeFile,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="the scheduler: slurm or kubernetes")] = "slurm",
    framework: Framework = FRAMEWORK,
    np: Ranks = 1,
    rival: Annotated[str | None, typer.Option(help="train with another method, as `hvdkit train` does")] = None,
    nodes: Annotated[int, typer.Option(help="number of machines or pods, with as many ranks on each")] = 1,
    cpus_per_task: Annotated[int | None, typer.Option(help="cores of a rank", show_default="the scheduler's")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of a machine or pod", show_default="none")] = None,
    time: Annotated[str | None, typer.Option(help="such as 12:00:00", show_default="the scheduler's")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the script or manifest", show_default="runs/…")
    ] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="your own Jinja template", show_default="hvdkit's")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the files")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="hand the job to the scheduler too")] = False,
    partition: Annotated[
        str | None, typer.Option(help="Slurm's partition", show_default="its default", rich_help_panel=_SLURM)
    ] = None,
    account: Annotated[
        str | None, typer.Option(help="the account that pays", show_default="yours", rich_help_panel=_SLURM)
    ] = None,
    constraint: Annotated[
        str | None, typer.Option(help="features that machines need", show_default="none", rich_help_panel=_SLURM)
    ] = None,
    lines: Annotated[
        list[str] | None,
        typer.Option(
            "--line",
            help="another option of sbatch, such as --line=--mail-type=END; may be repeated",
            rich_help_panel=_SLURM,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="the run's folder", show_default="runs/<recipe>-train-<time>", rich_help_panel=_SLURM),
    ] = None,
    array: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE,...",
            help="a task for each value, of a job array; may be repeated",
            rich_help_panel=_SLURM,
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="mpijob (MPI Operator) or trainjob (Kubeflow Trainer)", rich_help_panel=_KUBERNETES)
    ] = "mpijob",
    image: Annotated[
        str | None,
        typer.Option(help="an image of hvdkit's Dockerfile", show_default="required", rich_help_panel=_KUBERNETES),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM", help="claim of the run's folder", show_default="required", rich_help_panel=_KUBERNETES
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="the job's name", show_default="<recipe>-<time>", rich_help_panel=_KUBERNETES)
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="of the job", show_default="kubectl's", rich_help_panel=_KUBERNETES)
    ] = None,
    gpu_resource: Annotated[
        str, typer.Option(help="what a GPU is called", rich_help_panel=_KUBERNETES)
    ] = "nvidia.com/gpu",
    memory: Annotated[
        str | None, typer.Option(help="of a pod, such as 16Gi", show_default="any", rich_help_panel=_KUBERNETES)
    ] = None,
    shm: Annotated[
        str | None,
        typer.Option(help="size of /dev/shm, such as 2Gi", show_default="64 MiB", rich_help_panel=_KUBERNETES),
    ] = None,
    volumes: Annotated[
        list[str] | None,
        typer.Option(
            "--volume", metavar="CLAIM:/PATH", help="mounted in all pods; may be repeated", rich_help_panel=_KUBERNETES
        ),
    ] = None,
    secrets: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME[:/PATH]",
            help="as environment variables, or as files; may be repeated",
            rich_help_panel=_KUBERNETES,
        ),
    ] = None,
    pull_secret: Annotated[
        str | None, typer.Option(help="secret of the image's registry", rich_help_panel=_KUBERNETES)
    ] = None,
    node_selectors: Annotated[
        list[str] | None,
        typer.Option(
            "--node-selector", metavar="KEY=VALUE", help="label of nodes; may be repeated", rich_help_panel=_KUBERNETES
        ),
    ] = None,
    tolerations: Annotated[
        list[str] | None,
        typer.Option(
            "--toleration",
            metavar="KEY[=VALUE][:EFFECT]",
            help="of nodes' taints; may be repeated",
            rich_help_panel=_KUBERNETES,
        ),
    ] = None,
    clean_pods: Annotated[
        str, typer.Option(help="pods to delete at the end: running, all or none", rich_help_panel=_KUBERNETES)
    ] = "running",
    backoff_limit: Annotated[
        int, typer.Option(help="how often a job that fails is started again", rich_help_panel=_KUBERNETES)
    ] = 3,
    launcher_as_worker: Annotated[
        bool, typer.Option(help="ranks in the pod that starts the others too", rich_help_panel=_KUBERNETES)
    ] = True,
) -> None:
    """Write training as a job for a scheduler: a file that a person can read, with the resolved recipe."""
    from hvdkit import api

    names = _of_scheduler(ctx, to)
    resources = {name: value for name, value in ctx.params.items() if name in names and value is not None}
    job = api.submit(
        recipe, overrides, to=to, framework=framework, np=np, rival=rival, resources=resources, array=array, out=out,
        run=run, template=template, overwrite=overwrite, apply=apply,
    )  # fmt: skip
    typer.echo("\n".join(job.lines))


def _of_scheduler(ctx: typer.Context, to: str) -> set[str]:
    """The options that say what the scheduler is asked for. Raises RequestError for those of another one."""
    from hvdkit.commands.submit import OF_SLURM, RESOURCES

    fields = {name: {field.name for field in dataclasses.fields(kind)} for name, kind in RESOURCES.items()}
    own = fields.get(to, set())
    others = {
        scheduler: names - own | (set(OF_SLURM) if scheduler == "slurm" else set())
        for scheduler, names in fields.items()
        if own and scheduler != to
    }
    options = {param.name: param.opts[0] for param in ctx.command.params}
    faults = [
        f"{options[name]}: an option for --to {scheduler}, and this job is for {to}"
        for scheduler, names in others.items()
        for name in sorted(names)
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if faults:
        raise RequestError("\n".join(faults))
    return own
