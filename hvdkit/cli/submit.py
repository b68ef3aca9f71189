"""The command `hvdkit submit`."""

from __future__ import annotations

import shlex
import time as clock
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvdkit.cli.options import Framework, Overrides, Ranks, RecipeFile
from hvdkit.defaults import FRAMEWORK, OVERRIDES_FROM
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.commands.submit import Submission
    from hvdkit.launch.submission.kubernetes import Pods

# Options that one scheduler has alone, by their parameters.
_ONLY = {
    "slurm": ("partition", "account", "constraint", "line", "run"),
    "kubernetes": (
        "kind", "image", "results", "name", "namespace", "gpu_resource", "memory", "shm", "volume", "secret",
        "pull_secret", "node_selector", "toleration", "clean_pods", "backoff_limit", "launcher_as_worker",
    ),
}  # fmt: skip
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
    line: Annotated[
        list[str] | None,
        typer.Option(
            help="another option of sbatch, such as --line=--mail-type=END; may be repeated", rich_help_panel=_SLURM
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="the run's folder", show_default="runs/<recipe>-train-<time>", rich_help_panel=_SLURM),
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
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:/PATH", help="mounted in all pods; may be repeated", rich_help_panel=_KUBERNETES),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:/PATH]",
            help="as environment variables, or as files; may be repeated",
            rich_help_panel=_KUBERNETES,
        ),
    ] = None,
    pull_secret: Annotated[
        str | None, typer.Option(help="secret of the image's registry", rich_help_panel=_KUBERNETES)
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="label of nodes; may be repeated", rich_help_panel=_KUBERNETES),
    ] = None,
    toleration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=VALUE][:EFFECT]", help="of nodes' taints; may be repeated", rich_help_panel=_KUBERNETES
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
    from hvdkit import paths
    from hvdkit.commands import submit as submit_
    from hvdkit.commands.loading import load
    from hvdkit.launch.submission import kubernetes, sbatch

    _check_options(ctx, to)
    if to == "kubernetes" and (image is None or results is None):
        missing = [option for option, value in (("--image", image), ("--results", results)) if value is None]
        raise RequestError(f"{', '.join(missing)}: expected with --to kubernetes (docs/kubernetes.md)")
    checked, lines = load(recipe, overrides or [], overrides_from=OVERRIDES_FROM.get())
    for each in lines:
        typer.echo(each, err=True)
    if to == "slurm":
        place = run or paths.default_out(checked.name, "train")
        resources = sbatch.Resources(
            np, nodes, cpus_per_task, gpus_per_node, time, partition, account, constraint, tuple(line or ())
        )
        script = out or place.with_name(f"{place.name}.sbatch")
        _slurm(submit_.to_slurm(checked, framework, resources, rival, script, place, overwrite), place, apply)
        return
    assert image is not None and results is not None
    pods = kubernetes.Pods(
        name=name or kubernetes.default_name(checked.name, clock.strftime("%m%d-%H%M%S")),
        image=image,
        results=results,
        tasks=np,
        nodes=nodes,
        kind=kind,
        namespace=namespace,
        cpus_per_task=cpus_per_task,
        gpus_per_node=gpus_per_node,
        gpu_resource=gpu_resource,
        memory=memory,
        shm=shm,
        time=time,
        volumes=tuple(volume or ()),
        secrets=tuple(secret or ()),
        pull_secret=pull_secret,
        node_selectors=tuple(node_selector or ()),
        tolerations=tuple(toleration or ()),
        clean_pods=clean_pods,
        backoff_limit=backoff_limit,
        launcher_as_worker=launcher_as_worker,
    )
    # A faulty name is refused by its own line, and is no file's name before.
    file = out or Path("runs") / f"{Path(pods.name).name}.yaml"
    _kubernetes(submit_.to_kubernetes(checked, framework, pods, rival, file, overwrite), pods, apply)


def _check_options(ctx: typer.Context, to: str) -> None:
    """Raise RequestError for an unknown scheduler, and for options that another one has alone."""
    if to not in _ONLY:
        raise RequestError(f"--to {to}: expected {' or '.join(_ONLY)}")
    others = {name: scheduler for scheduler, names in _ONLY.items() if scheduler != to for name in names}
    options = {each.name: each.opts[0] for each in ctx.command.params}
    faults = [
        f"{options[name]}: an option for --to {scheduler}, and this job is for {to}"
        for name, scheduler in others.items()
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if faults:
        raise RequestError("\n".join(faults))


def _slurm(job: Submission, run: Path, apply: bool) -> None:
    from hvdkit.commands.submit import write

    number = write(job, apply)
    recipe = next(path for path in job.files if path != job.main)
    typer.echo(f"written to {job.main}, with the recipe {recipe.name} beside it")
    if number is None:
        typer.echo(f"start it with: {shlex.join(['sbatch', str(job.main)])}")
    else:
        log = job.main.with_name(f"{job.main.stem}-{number}.log")
        typer.echo(f"job {number}: its output goes to {log}, its results to {run.absolute()}")


def _kubernetes(job: Submission, pods: Pods, apply: bool) -> None:
    from hvdkit.commands.submit import write

    created = write(job, apply)
    typer.echo(f"written to {job.main}")
    if created is None:
        typer.echo(f"start it with: {shlex.join(['kubectl', 'create', '-f', str(job.main)])}")
        return
    where = ["-n", pods.namespace] if pods.namespace else []
    launcher = f"job/{pods.name}-launcher{'' if pods.kind == 'mpijob' else '-0'}"
    typer.echo(f"{created}: its results go to the folder {pods.name} of the claim {pods.results}")
    typer.echo(f"follow it with: {shlex.join(['kubectl', 'logs', *where, '-f', launcher])}")
