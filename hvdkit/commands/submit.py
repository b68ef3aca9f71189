"""`hvdkit submit`: training as a job for a scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError

from hvdkit import paths
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.baselines import registry
from hvdkit.commands import recipe_paths
from hvdkit.commands.fields import Framework, Overrides, Ranks, RecipeFile, texts
from hvdkit.commands.loading import loaded
from hvdkit.commands.request import Accepts, Option, Request
from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import Faults, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.launch.submission import kubectl, kubernetes, sbatch
from hvdkit.launch.submission.kubernetes import Pods, manifest
from hvdkit.launch.submission.sbatch import Resources
from hvdkit.recipe import grid as grids
from hvdkit.recipe import schema
from hvdkit.recipe.schema import OwnModel, Recipe

# What a job asks each scheduler for.
RESOURCES: Mapping[str, type] = {"slurm": Resources, "kubernetes": Pods}


@dataclass(frozen=True)
class Submission:
    """A job that has passed every check that can be made before the scheduler sees it.

    `main` is the one of the `files` that the scheduler gets, by `submit`, which returns the job's name or number there.
    `by_hand` is the command that does the same, `described` what users want to know of the job, by its name. `notes`
    say what the job needs that is not in the files.
    """

    files: Mapping[Path, str]
    main: Path
    submit: Callable[[], str]
    by_hand: list[str]
    described: Callable[[str], list[str]]
    notes: list[str]


@dataclass(frozen=True)
class Submitted:
    """A job that was written: the `file` for the scheduler and, once that has it, its name or number there, `job`.

    `lines` are for the user.
    """

    file: Path
    job: str | None
    lines: list[str]


def _array(name: str, given: Any) -> Any:
    return dict(given) if isinstance(given, Mapping) else grids.read(texts(name, given), "--array", Recipe)


_Slurm = partial(Option, panel="Slurm", in_python=False)
_Kubernetes = partial(Option, panel="Kubernetes", in_python=False)


class SubmitRequest(Request):
    """Write training as a job for a scheduler, `slurm` or `kubernetes`; with `apply` hand it over.

    `resources` are the scheduler's own options, such as `{"nodes": 2, "time": "1:00:00"}`: the fields of `Resources` in
    `hvdkit/launch/submission/sbatch.py`, or of `Pods` in `kubernetes.py` there.
    `template` is a Jinja template in place of hvdkit's own (docs/slurm.md#a-template-of-your-own).
    `array` makes a task of a Slurm array of each combination of values, such as `{"seed": [1, 2, 3]}`.
    """

    recipe: RecipeFile
    overrides: Overrides = None
    to: Annotated[Literal["slurm", "kubernetes"], Option("the scheduler: slurm or kubernetes")] = "slurm"
    framework: Framework = FRAMEWORK
    np: Ranks = 1
    rival: Annotated[str | None, Option("train with another method, as `hvdkit train` does")] = None
    resources: Annotated[dict[str, Any] | None, Option("", typed=False)] = None
    nodes: Annotated[int, Option("number of machines or pods, with as many ranks on each", in_python=False)] = 1
    cpus_per_task: Annotated[int | None, Option("cores of a rank", shown="the scheduler's", in_python=False)] = None
    gpus_per_node: Annotated[int | None, Option("GPUs of a machine or pod", shown="none", in_python=False)] = None
    time: Annotated[str | None, Option("such as 12:00:00", shown="the scheduler's", in_python=False)] = None
    out: Annotated[Path | None, Option("the script or manifest", metavar="FILE", shown="runs/…")] = None
    template: Annotated[Path | None, Option("your own Jinja template", metavar="FILE", shown="hvdkit's")] = None
    overwrite: Annotated[bool, Option("replace the files")] = False
    apply: Annotated[bool, Option("hand the job to the scheduler too")] = False
    partition: Annotated[str | None, _Slurm("Slurm's partition", shown="its default")] = None
    account: Annotated[str | None, _Slurm("the account that pays", shown="yours")] = None
    constraint: Annotated[str | None, _Slurm("features that machines need", shown="none")] = None
    lines: Annotated[
        list[str] | None,
        _Slurm("another option of sbatch, such as --line=--mail-type=END; may be repeated", ("--line",)),
    ] = None
    run: Annotated[Path | None, Option("the run's folder", shown="runs/<recipe>-train-<time>", panel="Slurm")] = None
    array: Annotated[
        dict[str, Any] | None,
        Accepts("Settings", "a dictionary, or a list of key=value", _array, list[str]),
        Option("a task for each value, of a job array; may be repeated", metavar="KEY=VALUE,VALUE,...", panel="Slurm"),
    ] = None
    kind: Annotated[str, _Kubernetes("mpijob (MPI Operator) or trainjob (Kubeflow Trainer)")] = "mpijob"
    image: Annotated[str | None, _Kubernetes("an image of hvdkit's Dockerfile", shown="required")] = None
    results: Annotated[str | None, _Kubernetes("claim of the run's folder", metavar="CLAIM", shown="required")] = None
    name: Annotated[str | None, _Kubernetes("the job's name", shown="<recipe>-<time>")] = None
    namespace: Annotated[str | None, _Kubernetes("of the job", shown="kubectl's")] = None
    gpu_resource: Annotated[str, _Kubernetes("what a GPU is called")] = "nvidia.com/gpu"
    memory: Annotated[str | None, _Kubernetes("of a pod, such as 16Gi", shown="any")] = None
    shm: Annotated[str | None, _Kubernetes("size of /dev/shm, such as 2Gi", shown="64 MiB")] = None
    volumes: Annotated[
        list[str] | None,
        _Kubernetes("mounted in all pods; may be repeated", ("--volume",), metavar="CLAIM:/PATH"),
    ] = None
    secrets: Annotated[
        list[str] | None,
        _Kubernetes("as environment variables, or as files; may be repeated", ("--secret",), metavar="NAME[:/PATH]"),
    ] = None
    pull_secret: Annotated[str | None, _Kubernetes("secret of the image's registry")] = None
    node_selectors: Annotated[
        list[str] | None,
        _Kubernetes("label of nodes; may be repeated", ("--node-selector",), metavar="KEY=VALUE"),
    ] = None
    tolerations: Annotated[
        list[str] | None,
        _Kubernetes("of nodes' taints; may be repeated", ("--toleration",), metavar="KEY[=VALUE][:EFFECT]"),
    ] = None
    clean_pods: Annotated[str, _Kubernetes("pods to delete at the end: running, all or none")] = "running"
    backoff_limit: Annotated[int, _Kubernetes("how often a job that fails is started again")] = 3
    launcher_as_worker: Annotated[
        bool,
        _Kubernetes("ranks in the pod that starts the others too", ("--launcher-as-worker/--no-launcher-as-worker",)),
    ] = True


def run(request: SubmitRequest) -> Submitted:
    """Write the job, and hand it over where that is asked for. Raises RequestError."""
    wanted = _resources(request)
    return _write((_for_slurm if request.to == "slurm" else _for_kubernetes)(request, wanted), request.apply)


def lines(request: SubmitRequest, result: Submitted) -> Iterator[str]:
    """What is written, and what follows."""
    yield from result.lines


def _resources(request: SubmitRequest) -> dict[str, Any]:
    """What the scheduler is asked for. Raises RequestError for what another one would be."""
    known = {to: {field.name for field in dataclasses.fields(kind)} for to, kind in RESOURCES.items()}
    known["slurm"] |= {"run", "array"}
    declared = SubmitRequest.declared()
    given = {
        name: getattr(request, name)
        for name, (info, option) in declared.items()
        if (option.panel or not option.in_python) and (name in request.typed or getattr(request, name) != info.default)
    }
    (other,) = RESOURCES.keys() - {request.to}
    if wrong := sorted(given.keys() & known[other] - known[request.to]):
        raise RequestError(
            "\n".join(
                f"{declared[name][1].option(name)}: an option for --to {other}, and this job is for {request.to}"
                for name in wrong
            )
        )
    resources = {name: value for name, value in given.items() if name not in ("run", "array")}
    return {**(request.resources or {}), **resources, "tasks": request.np}


def _built(kind: Any, wanted: Mapping[str, Any]) -> Any:
    """The resources of a job. Raises RequestError for keys and types that it does not have."""
    names = {field.name for field in dataclasses.fields(kind)} - {"tasks"}
    if unknown := sorted(wanted.keys() - names - {"tasks"}):
        raise RequestError(f"resources: {', '.join(unknown)}: expected some of {', '.join(sorted(names))}")
    try:
        return TypeAdapter(kind).validate_python(wanted)
    except ValidationError as error:
        lines = [f"resources: {fault['loc'][0]}: {fault['msg']}, got {fault['input']!r}" for fault in error.errors()]
        raise RequestError("\n".join(lines)) from None


def _tasks(request: SubmitRequest) -> dict[str, Recipe]:
    """The recipes of the tasks, with whole paths, by what is special about each; one named "" where there is no array.

    Raises RequestError for a grid that cannot be.
    """
    grid = request.array or {}
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise RequestError(f"--array {key}: expected a list of values, got {values!r}")
    if twice := [word for word in request.overrides or [] if word.partition("=")[0] in grid]:
        raise RequestError(f"{', '.join(twice)}: --array gives this key's values; leave one of the two out")
    if (count := math.prod(map(len, grid.values()))) > sbatch.MOST_TASKS:
        raise RequestError(f"--array: expected at most {sbatch.MOST_TASKS:,} tasks, got {count:,}")
    chosen = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    words = [texts("array", combination) for combination in chosen]
    recipes = {" ".join(changes): recipe_paths.absolute(loaded(request, extra=changes)) for changes in words}
    if len(recipes) < count:
        raise RequestError("--array: expected each value of a key once, as equal tasks train the same")
    return recipes


def _for_slurm(request: SubmitRequest, wanted: dict[str, Any]) -> Submission:
    """A batch script, with the resolved recipe beside it; for an array, whose tasks train into `run`/0, `run`/1 and so
    on, with one for each task.

    Raises RequestError with all faults of the request.
    """
    recipes, resources = _tasks(request), _built(Resources, wanted)
    array, name = list(recipes) != [""], next(iter(recipes.values())).name
    run = (request.run or paths.default_out(name, "train")).absolute()
    script = (request.out or run.with_name(f"{run.name}.sbatch")).absolute()
    base, number = script.with_suffix(""), f"-{sbatch.TASK}" if array else ""
    files = {Path(f"{base}{number.replace(sbatch.TASK, str(task))}.yaml"): recipe
             for task, recipe in enumerate(recipes.values())}  # fmt: skip
    faults = Faults()
    for recipe in recipes.values():
        faults += [fault for fault in _faults(request, recipe) if fault not in faults]
    if any(recipe.elastic for recipe in recipes.values()):
        faults.append("elastic: expected a recipe without it; the number of a Slurm job's tasks does not change")
    faults += resources.faults()
    if script.suffix == ".yaml":
        faults.append(f"--out {script}: expected a name such as job.sbatch; the recipe is written to {script}")
    faults += _existing(request, [script, *files])
    if os.path.lexists(run) and not run.is_dir():
        faults.append(f"--run {run}: no folder; expected a folder or a new name")
    faults += [*sbatch.fault("--out", script), *sbatch.fault("--run", run)]
    faults.report()
    folder = run / sbatch.TASK if array else run
    command = [
        sys.executable, "-m", "hvdkit", "train", f"{base}{number}.yaml", *_common(request),
        "--launcher", "slurm", "--out", str(folder), "--resume",
    ]  # fmt: skip
    log = script.with_name(f"{base.name}-{sbatch.NUMBERS}.log")
    text = sbatch.script(resources, name, command, folder, log, list(recipes) if array else (), request.template)

    def described(job: str) -> list[str]:
        output = str(log).replace(sbatch.NUMBERS, f"{job}_0" if array else job)
        if not array:
            return [f"job {job}: its output goes to {output}, its results to {run}"]
        return [f"job {job}, {len(recipes)} tasks: output goes to {output} and so on, results to {run / '0'} and so on"]

    return Submission(
        {**{path: schema.dump(recipe) for path, recipe in files.items()}, script: text},
        script,
        partial(sbatch.submit, script),
        ["sbatch", str(script)],
        described,
        [f"all nodes must see: {needed}"] if (needed := recipe_paths.needed(recipes.values())) else [],
    )


def _for_kubernetes(request: SubmitRequest, wanted: dict[str, Any]) -> Submission:
    """A manifest, with the resolved recipe in it. Raises RequestError with all faults of the request."""
    if missing := [f"--{name}" for name in ("image", "results") if name not in wanted]:
        raise RequestError(f"{', '.join(missing)}: expected with --to kubernetes (docs/kubernetes.md)")
    recipe = loaded(request)
    name = wanted.get("name") or kubernetes.default_name(recipe.name, time.strftime("%m%d-%H%M%S"))
    pods = _built(Pods, {**wanted, "name": name})
    # A faulty name is refused by its own line, and is no file's name before.
    out = (request.out or Path("runs") / f"{Path(pods.name).name}.yaml").absolute()
    faults, bounds = _faults(request, recipe), recipe.elastic
    if bounds and not bounds.min_np <= pods.tasks <= bounds.max_np:
        faults.append(f"-np {pods.tasks}: expected {bounds.min_np} to {bounds.max_np}, as elastic says")
    if isinstance(recipe.model, OwnModel) and not Path(recipe.model.script).is_absolute():
        faults.append(f"model.script: {recipe.model.script}: expected the whole path that it has in the image")
    faults += pods.faults(elastic=bounds is not None)
    if not str(out).isprintable():
        faults.append(f"--out {str(out)!r}: expected no control characters, and UTF-8")
    faults += _existing(request, [out])
    faults.report()
    needed = recipe_paths.needed([recipe], [volume.partition(":")[2] for volume in pods.volumes])
    text = manifest(pods, schema.dump(recipe), _common(request), elastic=bounds is not None, template=request.template)

    def described(job: str) -> list[str]:
        where = ["-n", pods.namespace] if pods.namespace else []
        launcher = f"job/{pods.name}-launcher{'' if pods.kind == 'mpijob' else '-0'}"
        return [
            f"{job}: its results go to the folder {pods.name} of the claim {pods.results}",
            f"follow it with: {shlex.join(['kubectl', 'logs', *where, '-f', launcher])}",
        ]

    return Submission(
        {out: text},
        out,
        partial(kubectl.create, out, pods.namespace),
        ["kubectl", "create", "-f", str(out)],
        described,
        [f"the image or a volume must have, as the manifest has the recipe alone: {needed}"] if needed else [],
    )


def _write(submission: Submission, apply: bool) -> Submitted:
    """Write the files, and with `apply` hand the job to the scheduler.

    Raises RequestError where a file cannot be written or the scheduler refuses the job; the files are then as they
    were.
    """
    before = {path: path.read_bytes() if path.exists() else None for path in submission.files}
    new = [folder for folder in submission.main.parents if not folder.exists()]
    try:
        for path, text in submission.files.items():
            _write_file(path, text)
        job = submission.submit() if apply else None
    except RequestError:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, content)
        for folder in new:
            with contextlib.suppress(OSError):  # not made, or not empty
                folder.rmdir()
        raise
    beside = [path.name for path in submission.files if path != submission.main]
    with_recipe = f", with the recipe {beside[0]}{' and others' if beside[1:] else ''} beside it" if beside else ""
    then = [f"start it with: {shlex.join(submission.by_hand)}"] if job is None else submission.described(job)
    return Submitted(submission.main, job, [f"written to {submission.main}{with_recipe}", *submission.notes, *then])


def _faults(request: SubmitRequest, recipe: Recipe) -> Faults:
    """What is wrong with a request, whatever the scheduler."""
    faults = Faults()
    if request.framework not in CAPABILITIES:
        faults.append(f"unknown framework {request.framework!r}; expected one of {', '.join(CAPABILITIES)}")
    elif request.rival is not None:
        faults += registry.check([request.rival], [request.framework], [request.np])
    if request.np < 1:
        faults.append(f"-np {request.np}: expected a whole number of ranks, 1 or more")
    if recipe.checkpoint is None:
        faults.append("checkpoint: expected one; without it a job that is started again begins anew")
    return faults


def _existing(request: SubmitRequest, files: list[Path]) -> list[str]:
    there = [] if request.overwrite else [path for path in files if path.exists()]
    return [f"--out: {path} exists; give --overwrite, or another name" for path in there]


def _common(request: SubmitRequest) -> list[str]:
    """Options of `hvdkit train`, whatever the scheduler."""
    rival = ["--rival", request.rival] if request.rival else []
    return ["--framework", request.framework, "-np", str(request.np), *rival]


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise RequestError(f"--out {path}: cannot be written ({error.strerror})") from None
    except RunError as error:
        raise RequestError(f"--out: {error}") from None
