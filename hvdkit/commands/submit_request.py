"""What `hvdkit submit` is asked for: its options, and how their texts have to look."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hvdkit.commands.fields import FRAMEWORKS_HELP, Overrides, Ranks, RecipeFile, texts
from hvdkit.commands.request import Accepts, Form, Option, Request
from hvdkit.recipe import grid as grids
from hvdkit.recipe.schema import Recipe

LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1035, as services and so MPIJobs are named
# RFC 1123, as other objects
_NAME = r"(?![^:]{254})[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_KEY = r"([a-z0-9]([-.a-z0-9]{0,250}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
_SIZE = r"[1-9]\d{0,14}([KMGTPE]i|[kMGTPE])?"
_PATH = r"(/[\w.@+-]+)+"
TOLERATION = rf"(?P<key>{_KEY})(=(?P<value>{_VALUE}))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
_OBJECT = Form(_NAME, "the name of an object, of lower-case letters, digits, '-'")
_IMAGE = Form(r"[a-z0-9][\w./:-]{0,250}(@sha256:[0-9a-f]{64})?", "an image such as registry.example.org/hvdkit:pytorch")
_TAINT = Form(TOLERATION, "KEY[=VALUE][:EFFECT], EFFECT NoSchedule, PreferNoSchedule or NoExecute")
_SLURM_NAME = Form(r"[A-Za-z0-9_][\w.,:@+-]{0,200}", "a name as Slurm has them, of letters, digits, '_', '-', '.'")
_LINE = Form(
    r"(?!--array\b|-a)--?[A-Za-z][\w-]*([ =][^\x00-\x1f\x7f-\x9f\ud800-\udfff]*)?",
    "an option of sbatch, such as --mail-type=END, and for arrays --array KEY=VALUE,VALUE,... in its place",
)


def _array(name: str, given: Any) -> Any:
    return dict(given) if isinstance(given, Mapping) else grids.read(texts(name, given), "--array", Recipe)


# A panel names the schedulers that its options are for.
_Slurm = partial(Option, panel="Slurm", in_python=False)
_Kubernetes = partial(Option, panel="Kubernetes", in_python=False)
_Machines = partial(Option, panel="Slurm and Kubernetes", in_python=False)


class SubmitRequest(Request):
    """Write training as a job for a scheduler, `slurm`, `kubernetes` or `ray`; with `apply` hand it over.

    In place of the recipe it may be a script of your own, or a command of hvdkit, with the words after it in
    `overrides`: `-- compare RECIPE --rounds 6`.

    `resources` are the scheduler's own options by their names, such as `{"nodes": 2, "time": "1:00:00"}`:
    `hvdkit submit --help` has them all, and of those that may be repeated the name is in the plural.
    `template` is a Jinja template in place of hvdkit's own (docs/slurm.md#a-template-of-your-own).
    `array` makes a task of a Slurm array of each combination of values, such as `{"seed": [1, 2, 3]}`.
    """

    recipe: RecipeFile
    overrides: Overrides = None
    to: Annotated[Literal["slurm", "kubernetes", "ray"], Option("the scheduler: slurm, kubernetes or ray")] = "slurm"
    framework: Annotated[str | None, Option(FRAMEWORKS_HELP, shown="pytorch, or that of the script")] = None
    np: Annotated[Ranks, Field(ge=1)] = 1
    rival: Annotated[str | None, Option("train with another method, as `hvdkit train` does")] = None
    resources: Annotated[dict[str, Any] | None, Option("", typed=False)] = None
    nodes: Annotated[int, _Machines("number of machines or pods, with as many ranks on each"), Field(ge=1)] = 1
    cpus_per_task: Annotated[int | None, _Machines("cores of a rank", shown="the scheduler's"), Field(ge=1)] = None
    gpus_per_node: Annotated[int | None, _Machines("GPUs of a machine or pod", shown="none"), Field(ge=0)] = None
    time: Annotated[
        str | None,
        _Machines("such as 12:00:00", shown="the scheduler's"),
        Form(r"(\d+-)?\d+(:\d\d?){0,2}|(?i:UNLIMITED)", "minutes, HH:MM:SS or D-HH:MM:SS"),
    ] = None
    script: Annotated[Path | None, Option("the script or manifest to write", metavar="FILE", shown="runs/…")] = None
    template: Annotated[Path | None, Option("your own Jinja template", metavar="FILE", shown="hvdkit's")] = None
    overwrite: Annotated[bool, Option("replace the files")] = False
    apply: Annotated[bool, Option("hand the job to the scheduler too")] = False
    partition: Annotated[str | None, _Slurm("Slurm's partition", shown="its default"), _SLURM_NAME] = None
    account: Annotated[str | None, _Slurm("the account that pays", shown="yours"), _SLURM_NAME] = None
    constraint: Annotated[
        str | None,
        _Slurm("features that machines need", shown="none"),
        Form(r"[\w.,&|*()\[\]-]{1,200}", "features such as a100, joined by & or |"),
    ] = None
    lines: Annotated[
        list[str] | None,
        _Slurm("another option of sbatch, such as --line=--mail-type=END; may be repeated", ("--line",)),
        _LINE,
    ] = None
    requeue: Annotated[
        bool, _Slurm("queue a script again when its time ends: it continues from a checkpoint of its own")
    ] = False
    out: Annotated[
        Path | None,
        Option("the run's folder", old=("--run",), shown="in runs, by recipe and time", panel="Slurm and Ray"),
    ] = None
    array: Annotated[
        dict[str, Any] | None,
        Accepts("Settings", "a dictionary, or a list of key=value", _array, list[str]),
        Option("a task for each value, of a job array; may be repeated", metavar="KEY=VALUE,VALUE,...", panel="Slurm"),
    ] = None
    kind: Annotated[
        str,
        _Kubernetes("mpijob (MPI Operator) or trainjob (Kubeflow Trainer)"),
        Form("mpijob|trainjob", "mpijob or trainjob"),
    ] = "mpijob"
    image: Annotated[str | None, _Kubernetes("an image of hvdkit's Dockerfile", shown="required"), _IMAGE] = None
    results: Annotated[
        str | None, _Kubernetes("claim of the run's folder", metavar="CLAIM", shown="required"), _OBJECT
    ] = None
    name: Annotated[
        str | None,
        Option("the job's name", shown="<recipe>-<time>", panel="Kubernetes and Ray", in_python=False),
    ] = None
    namespace: Annotated[
        str | None, _Kubernetes("of the job", shown="kubectl's"), Form(LABEL, "lower-case letters, digits and '-'")
    ] = None
    gpu_resource: Annotated[
        str, _Kubernetes("what a GPU is called"), Form(_KEY, "a resource such as nvidia.com/gpu")
    ] = "nvidia.com/gpu"
    memory: Annotated[
        str | None, _Kubernetes("of a pod, such as 16Gi", shown="any"), Form(_SIZE, "a size such as 16Gi")
    ] = None
    shm: Annotated[
        str | None, _Kubernetes("size of /dev/shm, such as 2Gi", shown="64 MiB"), Form(_SIZE, "a size such as 2Gi")
    ] = None
    volumes: Annotated[
        list[str] | None,
        _Kubernetes("mounted in all pods; may be repeated", ("--volume",), metavar="CLAIM:/PATH"),
        Form(f"{_NAME}:{_PATH}", "CLAIM:/PATH"),
    ] = None
    secrets: Annotated[
        list[str] | None,
        _Kubernetes("as environment variables, or as files; may be repeated", ("--secret",), metavar="NAME[:/PATH]"),
        Form(f"{_NAME}(:{_PATH})?", "NAME or NAME:/PATH"),
    ] = None
    pull_secret: Annotated[str | None, _Kubernetes("secret of the image's registry"), _OBJECT] = None
    node_selectors: Annotated[
        list[str] | None,
        _Kubernetes("label of nodes; may be repeated", ("--node-selector",), metavar="KEY=VALUE"),
        Form(f"{_KEY}={_VALUE}", "KEY=VALUE, a label of nodes"),
    ] = None
    tolerations: Annotated[
        list[str] | None,
        _Kubernetes("of nodes' taints; may be repeated", ("--toleration",), metavar="KEY[=VALUE][:EFFECT]"),
        _TAINT,
    ] = None
    clean_pods: Annotated[
        str,
        _Kubernetes("pods to delete at the end: running, all or none"),
        Form("running|all|none", "running, all or none"),
    ] = "running"
    backoff_limit: Annotated[int, _Kubernetes("how often a job that fails is started again"), Field(ge=0)] = 3
    launcher_as_worker: Annotated[
        bool, _Kubernetes("no ranks in the pod that starts the others", ("--no-launcher-as-worker",))
    ] = True
