"""`hvdkit submit`: training, or another command, as a job for a scheduler, and the command that hands it over."""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hvdkit import paths
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.baselines import registry
from hvdkit.commands import any_command, own_script, recipe_paths
from hvdkit.commands.any_command import AnyCommand
from hvdkit.commands.fields import texts
from hvdkit.commands.loading import loaded
from hvdkit.commands.submit_request import LABEL, TOLERATION, SubmitRequest
from hvdkit.errors import Faults, RequestError
from hvdkit.launch.submission import programs
from hvdkit.launch.submission.job_files import NUMBERS, Submission, Submitted, write
from hvdkit.launch.submission.templating import TASK, render
from hvdkit.recipe import schema
from hvdkit.recipe.schema import OwnModel, Recipe

MOST_TASKS = 1000  # of an array; Slurm's MaxArraySize is 1001 by default
# Where the images (Dockerfile) and the templates have the claim of the results, and the job's own files.
RUNS, JOB_FILES = "/home/hvdkit/runs", "/etc/hvdkit"
_TAKEN = (RUNS, JOB_FILES, "/home/hvdkit/.ssh", "/etc/mpi", "/dev/shm")
NAME_LENGTH = 40  # with a default name, all names that operators make of it have at most 63 characters
_SECONDS = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d\d)(?::(\d\d))?|(\d{1,7})", re.ASCII)
_PLAIN = re.compile(r"[\w./%+:,@=~-]+")


def run(request: SubmitRequest) -> Submitted:
    """Write the job, and hand it over where that is asked for. Raises RequestError with all faults of the request."""
    request = _checked(request)
    command = any_command.asked(request)
    if request.requeue and (command is None or command.resumes):
        raise RequestError("--requeue: expected a script of your own; what hvdkit trains is queued again anyway")
    return write((_for_kubernetes if request.to == "kubernetes" else _for_nodes)(request, command), request.apply)


def lines(request: SubmitRequest, result: Submitted) -> Iterator[str]:
    """What is written, and what follows."""
    yield from result.lines


def _checked(request: SubmitRequest) -> SubmitRequest:
    """The request with its `resources` as fields. Raises RequestError for unknown ones, and for those of a scheduler
    that is not asked."""
    declared, resources = SubmitRequest.declared(), request.resources or {}
    others = {name: option.panel.lower().split(" and ") for name, (_, option) in declared.items()
              if option.panel and request.to.capitalize() not in option.panel}  # fmt: skip
    names = sorted(name for name, (_, option) in declared.items() if not option.in_python and name not in others)
    if unknown := sorted(resources.keys() - set(names)):
        raise RequestError(f"resources: {', '.join(unknown)}: expected some of {', '.join(names)}")
    if request.out is not None and request.out.suffix in (".sbatch", ".sh", ".yaml", ".yml"):
        raise RequestError(f"--out {request.out}: the run's folder; the script or manifest is --script {request.out}")
    Faults(
        f"{option.option(name)}: an option for --to {' and '.join(others[name])}, and this job is for {request.to}"
        for name, (info, option) in declared.items()
        if name in others and (name in request.typed or getattr(request, name) != info.default)
    ).report()
    fields = {name: getattr(request, name) for name in declared} | {"resources": None} | resources
    return SubmitRequest.of(fields, request.typed)


def _values(request: SubmitRequest, **more: Any) -> dict[str, Any]:
    """What a template has: all options by their names, and more."""
    return {name: getattr(request, name) for name in SubmitRequest.declared()} | more


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
    if (count := math.prod(map(len, grid.values()))) > MOST_TASKS:
        raise RequestError(f"--array: expected at most {MOST_TASKS:,} tasks, got {count:,}")
    chosen = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    words = [texts("array", combination) for combination in chosen]
    read = {" ".join(changes): loaded(request, extra=changes, trains=True) for changes in words}
    recipes = {changes: recipe_paths.absolute(recipe) for changes, recipe in read.items()}
    if len(recipes) < count:
        raise RequestError("--array: expected each value of a key once, as equal tasks train the same")
    return recipes


def _for_nodes(request: SubmitRequest, command: AnyCommand | None) -> Submission:
    """A script for Slurm or Ray, whose nodes see the same folders, with the resolved recipe beside it; for an array,
    whose tasks train into `run`/0, `run`/1 and so on, with one for each task."""
    recipes: Mapping[str, Recipe] = {} if command else _tasks(request)
    array, name = bool(request.array), command.name if command else next(iter(recipes.values())).name
    if command:
        run = any_command.folder(request, command)
    else:
        run = (request.out or paths.default_out(name, "train")).absolute()
        request = _under(request, next(iter(recipes.values())))
    ray = request.to == "ray"
    suffix = ".sh" if ray else ".sbatch"
    out = (request.script or run.with_name(f"{run.name}{suffix}")).absolute()
    base, number = out.with_suffix(""), f"-{TASK}" if array else ""
    files = {Path(f"{base}{number.replace(TASK, str(task))}.yaml"): recipe
             for task, recipe in enumerate(recipes.values())}  # fmt: skip
    about = [command.recipe] if command and command.recipe else list(recipes.values())
    faults = _faults(request, recipes.values(), [out, *files])
    for bounds in (recipe.elastic for recipe in recipes.values() if recipe.elastic):
        if ray:
            faults += _outside(request, bounds)
        else:
            faults.append("elastic: expected a recipe without it; the number of a Slurm job's tasks does not change")
    if out.suffix == ".yaml":
        faults.append(f"--script {out}: expected a name such as job{suffix}; the recipe is written to {out}")
    called = request.name or default_name(name, time.strftime("%m%d-%H%M%S"))
    if ray and not re.fullmatch(LABEL, called):
        faults.append(f"--name {called!r}: expected lower-case letters, digits and '-', beginning with a letter")
    if os.path.lexists(run) and not run.is_dir():
        faults.append(f"--out {run}: no folder; expected a folder or a new name")
    for option, path in (("--script", out), ("--out", run)):
        if "\\" in str(path):
            what = "expected no backslash in it, as Slurm then writes all jobs' output to one file"
            faults.append(f"{option} {path}: {what}")
    faults += _unprintable("--out", run)
    faults.report()
    folder = run / TASK if array else run
    words = [sys.executable, "-m", "hvdkit"]
    words += command.line(request, str(run)) if command else _trains(request, f"{base}{number}.yaml", str(folder))
    continues = command is None or command.resumes
    notes = [f"all nodes must see: {needed}"] if (needed := recipe_paths.needed(about)) else []
    beside = {path: schema.dump(recipe) for path, recipe in files.items()}
    if ray:
        values = _values(request, name=called, command=words, folder=str(Path.cwd()), continues=continues)
        follow = f"follow it with: {shlex.join([programs.RAY, 'job', 'logs', '-f', called])}"
        described, by_hand = [f"job {NUMBERS}: its results go to {run}", follow], [programs.RAY, *programs.ray_job(out)]
        text = render("ray.sh.j2", request.template, values)
        return Submission({**beside, out: text}, out, partial(programs.ray, out, called), by_hand, described, notes)
    log = out.with_name(f"{base.name}-{NUMBERS}.log")
    # A script writes none of ours: one that SIGTERM has ended is not finished.
    finished = str(folder / (command.file if command else "result.json")) if continues else ""
    text = script(request, name, words, finished, log, list(recipes) if array else ())
    described = [f"job {NUMBERS}: its output goes to {log}, its results to {run}"]
    if array:
        first = str(log).replace(NUMBERS, f"{NUMBERS}_0")
        where = f"output goes to {first} and so on, results to {run / '0'} and so on"
        described = [f"job {NUMBERS}, {len(recipes)} tasks: {where}"]
    by_hand = ["sbatch", str(out)]
    return Submission({**beside, out: text}, out, partial(programs.sbatch, out), by_hand, described, notes)


def script(
    request: SubmitRequest, name: str, command: list[str], finished: str, log: Path, tasks: Sequence[str] = ()
) -> str:
    """The batch script of a job that runs `command`, again until the file `finished` is there; "": only with --requeue.

    With `tasks` it is an array of them, each described by a text; `TASK` in a word or a path stands for its number.
    """
    # A literal `%` is written twice (sbatch(1), filename pattern). sbatch takes off quotes, and the backslash before a
    # character, also between quotes (Slurm's src/sbatch/opt.c, _get_argument).
    path = str(log).replace("%", "%%").replace(NUMBERS, "%A_%a" if tasks else "%j")
    values = _values(
        request,
        name=name,
        ranks=request.np,
        lines=request.lines or [],
        array=[" ".join(text.split()) for text in tasks],
        log=path if _PLAIN.fullmatch(path) else '"' + path.replace('"', '\\"') + '"',
        command=command,
        finished=finished,
        continues=request.requeue or bool(finished),
    )
    return render("slurm.sbatch.j2", request.template, values)


def _for_kubernetes(request: SubmitRequest, command: AnyCommand | None) -> Submission:
    """A manifest, with the resolved recipe in it."""
    if missing := [f"--{name}" for name in ("image", "results") if getattr(request, name) is None]:
        raise RequestError(f"{', '.join(missing)}: expected with --to kubernetes (docs/kubernetes.md)")
    recipe = command.recipe if command else loaded(request, trains=True)
    called = command.name if command else recipe.name if recipe else ""
    name = request.name or default_name(called, time.strftime("%m%d-%H%M%S"))
    request, bounds = request.model_copy(update={"name": name}), recipe.elastic if recipe and not command else None
    if recipe and not command:
        request = _under(request, recipe)
    # A faulty name is refused by its own line, and is no file's name before.
    out = (request.script or Path("runs") / f"{Path(name).name}.yaml").absolute()
    recipes = [recipe] if recipe else []
    faults = _faults(request, [] if command else recipes, [out])
    faults += _outside(request, bounds)
    if recipe and isinstance(recipe.model, OwnModel) and not Path(recipe.model.script).is_absolute():
        faults.append(f"model.script: {recipe.model.script}: expected the whole path that it has in the image")
    faults += pod_faults(request, elastic=bounds is not None)
    faults.report()
    needed = recipe_paths.needed(recipes, [volume.partition(":")[2] for volume in request.volumes or []])
    file, out_there = f"{JOB_FILES}/recipe.yaml", f"{RUNS}/{name}"
    given = file if recipe else None
    words = command.line(request, out_there, given) if command else _trains(request, file, out_there)
    text = manifest(request, schema.dump(recipe) if recipe else "", words, bounds is not None)

    where = ["-n", request.namespace] if request.namespace else []
    launcher = f"job/{name}-launcher{'' if request.kind == 'mpijob' else '-0'}"
    return Submission(
        {out: text},
        out,
        partial(programs.kubectl, out, request.namespace),
        ["kubectl", "create", "-f", str(out)],
        [
            f"{NUMBERS}: its results go to the folder {name} of the claim {request.results}",
            f"follow it with: {shlex.join(['kubectl', 'logs', *where, '-f', launcher])}",
        ],
        [f"the image or a volume must have, as the manifest has the recipe alone: {needed}"] if needed else [],
    )


def _seconds(request: SubmitRequest) -> int | None:
    """`time` in seconds; minutes where it is a single number."""
    match = _SECONDS.fullmatch(request.time or "")
    if match is None:
        return None
    days, hours, minutes, rest, alone = (int(group or 0) for group in match.groups())
    return 60 * alone or ((24 * days + hours) * 60 + minutes) * 60 + rest


def pod_faults(request: SubmitRequest, elastic: bool) -> Faults:
    """What is wrong with the pods of the job `name`: a line for each fault. `elastic`: ranks may join and leave."""
    faults = Faults()
    if request.kind == "trainjob" and request.clean_pods != "running":
        faults.append("--clean-pods: expected --kind mpijob with it; a TrainJob's pods stay until it is deleted")
    if request.gpu_resource != "nvidia.com/gpu" and not request.gpus_per_node:
        faults.append("--gpu-resource: expected --gpus-per-node with it")
    if elastic and request.kind == "trainjob":
        faults.append("--kind trainjob: expected a recipe without `elastic`, or --kind mpijob, whose pods may change")
    if request.time and not _seconds(request):
        faults.append(f"--time {request.time!r}: expected minutes, HH:MM:SS or D-HH:MM:SS, above 0")
    # The longest names that the operators make of it: of the last worker, and of JobSet's pods.
    ending = f"-worker-{request.nodes - 1}" if request.kind == "mpijob" else "-launcher-0-0-xxxxx"
    if not re.fullmatch(LABEL, f"{request.name}{ending}"):
        faults.append(
            f"--name {request.name!r}: expected at most {63 - len(ending)} characters, lower-case letters, digits and "
            "'-', beginning with a letter; the operator names pods after it"
        )
    seen = list(_TAKEN)
    for text in (*(request.volumes or ()), *(request.secrets or ())):
        path = text.partition(":")[2]
        if path in seen:
            faults.append(f"--volume or --secret {text!r}: {path} is taken; expected another path")
        seen += [path] if path else []
    return faults


def manifest(request: SubmitRequest, recipe: str, command: list[str], elastic: bool) -> str:
    """The job `name` as YAML: Kubeflow's MPIJob (v2beta1) or TrainJob (Trainer v2), with the recipe, a YAML.

    It runs a command of hvdkit. Raises RequestError where the user's own template has a fault, or what it writes is no
    manifest.
    """
    words = ["hvdkit", *command]
    if elastic:
        words += ["--launcher", "horovodrun", "--host-discovery-script", f"{JOB_FILES}/discover-hosts.sh"]
    tolerations = [match for text in request.tolerations or [] if (match := re.fullmatch(TOLERATION, text, re.ASCII))]
    values = _values(
        request,
        slots=request.np // request.nodes,
        seconds=_seconds(request),
        volumes=[text.partition(":")[::2] for text in request.volumes or []],
        secrets=[text.partition(":")[::2] for text in request.secrets or []],
        node_selectors=[text.partition("=")[::2] for text in request.node_selectors or []],
        tolerations=[(match["key"], match["value"], match["effect"]) for match in tolerations],
        recipe=recipe,
        elastic=elastic,
        command=words,
        # Whether the pod that starts the ranks runs some: in an elastic job any worker may be lost, but not that pod.
        both=request.launcher_as_worker and not elastic,
    )
    text = render(f"{request.kind}.yaml.j2", request.template, values)
    if request.template is not None:
        try:
            objects = list(yaml.safe_load_all(text))
        except yaml.YAMLError as error:
            raise RequestError(f"--template {request.template}: no YAML: {' '.join(str(error).split())}") from None
        if not objects or not all(isinstance(one, dict) and "kind" in one for one in objects):
            raise RequestError(f"--template {request.template}: expected objects of Kubernetes, each with its `kind`")
    return text


def default_name(recipe: str, stamp: str) -> str:
    """A job's name: of the recipe, and a time, which makes it unique."""
    room = NAME_LENGTH - len(stamp) - 1
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).lstrip("-0123456789")[:room].strip("-") or "hvdkit"
    return f"{slug}-{stamp}"


def _faults(request: SubmitRequest, recipes: Iterable[Recipe], files: Sequence[Path]) -> Faults:
    """What is wrong with a request, whatever the scheduler; the first of the `files` is the scheduler's."""
    faults = Faults()
    if request.framework not in (None, *CAPABILITIES):
        faults.append(f"unknown framework {request.framework!r}; expected one of {', '.join(CAPABILITIES)}")
    elif request.rival is not None and request.framework is not None:
        faults += registry.check([request.rival], [request.framework], [request.np])
    if request.np % request.nodes:
        faults.append(f"-np {request.np}: expected a multiple of --nodes {request.nodes}, with as many ranks on each")
    if any(recipe.checkpoint is None for recipe in recipes):
        faults.append("checkpoint: expected one; without it a job that is started again begins anew")
    there = [] if request.overwrite else [path for path in files if path.exists()]
    faults += [f"--script: {path} exists; give --overwrite, or another name" for path in there]
    faults += _unprintable("--script", files[0])
    return faults


def _outside(request: SubmitRequest, bounds: schema.Elastic | None) -> list[str]:
    if bounds is None or bounds.min_np <= request.np <= bounds.max_np:
        return []
    return [f"-np {request.np}: expected {bounds.min_np} to {bounds.max_np}, as elastic says"]


def _unprintable(option: str, path: Path) -> list[str]:
    text = str(path)
    wrong = any(unicodedata.category(sign) in ("Cc", "Cs") for sign in text)  # the latter for bytes that are no UTF-8
    return [f"{option} {text!r}: expected no control characters, and UTF-8"] if wrong else []


def _under(request: SubmitRequest, recipe: Recipe) -> SubmitRequest:
    return request.model_copy(update={"framework": own_script.framework_for(recipe, request.framework)})


def _trains(request: SubmitRequest, recipe: str, folder: str) -> list[str]:
    """The words of training into the folder; on Kubernetes the launcher is found there."""
    rival = ["--rival", request.rival] if request.rival else []
    launcher = [] if request.to == "kubernetes" else ["--launcher", request.to]
    options = ["--framework", str(request.framework), "-np", str(request.np), *rival, *launcher]
    return ["train", recipe, *options, "--out", folder, "--resume"]
