"""What a job asks Kubernetes for, what is wrong with it before the cluster sees it, and the manifest of the job.

It is Kubeflow's MPIJob (v2beta1) or TrainJob (Trainer v2), with the recipe. Both operators start pods with sshd, and
one pod with the names of all in /etc/mpi/hostfile; there `hvdkit train` starts the ranks by mpirun.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from hvdkit.errors import Faults, RequestError
from hvdkit.launch.submission.forms import faults_of
from hvdkit.launch.submission.templating import render

# Where the images (Dockerfile) and the templates have the claim of the results, and the job's own files.
RUNS, JOB_FILES = "/home/hvdkit/runs", "/etc/hvdkit"
_TAKEN = (RUNS, JOB_FILES, "/home/hvdkit/.ssh", "/etc/mpi", "/dev/shm")
CLEAN = ("running", "all", "none")  # pods that the operator deletes when the job has ended
NAME_LENGTH = 40  # with a default name, all names that operators make of it have at most 63 characters
_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1035, as services and so MPIJobs are named
# RFC 1123, as other objects
_NAME = r"(?![^:]{254})[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_KEY = r"([a-z0-9]([-.a-z0-9]{0,250}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
_SIZE = r"[1-9]\d{0,14}([KMGTPE]i|[kMGTPE])?"
_PATH = r"(/[\w.@+-]+)+"
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d\d)(?::(\d\d))?|(\d{1,7})", re.ASCII)
_TOLERATION = re.compile(
    rf"(?P<key>{_KEY})(=(?P<value>{_VALUE}))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?", re.ASCII
)
_OBJECT = _NAME, "the name of an object, of lower-case letters, digits, '-'"
_FORMS = {
    "kind": ("mpijob|trainjob", "mpijob or trainjob"),
    "namespace": (_LABEL, "lower-case letters, digits and '-'"),
    "results": _OBJECT,
    "pull_secret": _OBJECT,
    "memory": (_SIZE, "a size such as 16Gi"),
    "shm": (_SIZE, "a size such as 2Gi"),
    "gpu_resource": (_KEY, "a resource such as nvidia.com/gpu"),
    "image": (
        r"[a-z0-9][\w./:-]{0,250}(@sha256:[0-9a-f]{64})?",
        "an image such as registry.example.org/hvdkit:pytorch",
    ),
    "time": (_TIME.pattern, "minutes, HH:MM:SS or D-HH:MM:SS"),
    "clean_pods": ("|".join(CLEAN), ", ".join(CLEAN)),
    "volumes": (f"{_NAME}:{_PATH}", "CLAIM:/PATH"),
    "secrets": (f"{_NAME}(:{_PATH})?", "NAME or NAME:/PATH"),
    "node_selectors": (f"{_KEY}={_VALUE}", "KEY=VALUE, a label of nodes"),
    "tolerations": (_TOLERATION.pattern, "KEY[=VALUE][:EFFECT], EFFECT NoSchedule, PreferNoSchedule or NoExecute"),
}


@dataclass(frozen=True)
class Pods:
    """What the pods of the job `name` ask for: `nodes` pods with `tasks // nodes` ranks each.

    `results` is the claim (PersistentVolumeClaim) of the run's folder. `volumes` are CLAIM:/PATH, `secrets` NAME (its
    keys become environment variables) or NAME:/PATH (they become files), `node_selectors` KEY=VALUE, `tolerations`
    KEY[=VALUE][:EFFECT]. `memory` and `shm` are sizes such as 16Gi, `time` is as in sbatch --time. Without
    `launcher_as_worker` one more pod starts the ranks, and runs none.
    """

    name: str
    image: str
    results: str
    tasks: int
    nodes: int = 1
    kind: str = "mpijob"
    namespace: str | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    memory: str | None = None
    shm: str | None = None
    time: str | None = None
    volumes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    pull_secret: str | None = None
    node_selectors: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    clean_pods: str = "running"
    backoff_limit: int = 3
    launcher_as_worker: bool = True

    @property
    def slots(self) -> int:
        """The ranks of a pod."""
        return self.tasks // self.nodes

    @cached_property
    def seconds(self) -> int | None:
        """`time` in seconds; minutes where it is a single number."""
        match = _TIME.fullmatch(self.time or "")
        if match is None:
            return None
        days, hours, minutes, rest, alone = (int(group or 0) for group in match.groups())
        return 60 * alone or ((24 * days + hours) * 60 + minutes) * 60 + rest

    def faults(self, elastic: bool) -> Faults:
        """What is wrong with it: a line for each fault. `elastic`: ranks may join and leave."""
        least = {"nodes": 1, "cpus_per_task": 1, "gpus_per_node": 0, "backoff_limit": 0}
        faults = faults_of(self, least, _FORMS)
        if elastic and self.kind == "trainjob":
            faults.append(
                "--kind trainjob: expected a recipe without `elastic`, or --kind mpijob, whose pods may change"
            )
        if self.seconds == 0:
            faults.append(f"--time {self.time}: expected a time above 0")
        # The longest names that the operators make of it: of the last worker, and of JobSet's pods.
        ending = f"-worker-{self.nodes - 1}" if self.kind == "mpijob" else "-launcher-0-0-xxxxx"
        if not re.fullmatch(_LABEL, f"{self.name}{ending}"):
            faults.append(
                f"--name {self.name!r}: expected at most {63 - len(ending)} characters, lower-case letters, digits and "
                "'-', beginning with a letter; the operator names pods after it"
            )
        seen = list(_TAKEN)
        for text in (*self.volumes, *self.secrets):
            path = text.partition(":")[2]
            if path in seen:
                faults.append(f"--volume or --secret {text!r}: {path} is taken; expected another path")
            seen += [path] if path else []
        return faults


def run_folder(pods: Pods) -> str:
    """The run's folder in the pods, on the claim of the results."""
    return f"{RUNS}/{pods.name}"


def manifest(pods: Pods, recipe: str, command: list[str], elastic: bool, template: Path | None = None) -> str:
    """The job as YAML. It runs `command` with the recipe's file and the run's folder added; `recipe` is its YAML.

    `template` is the user's own. Raises RequestError where it has a fault, or what it writes is no manifest.
    """
    words = ["hvdkit", "train", f"{JOB_FILES}/recipe.yaml", *command, "--out", run_folder(pods), "--resume"]
    if elastic:
        words += ["--launcher", "horovodrun", "--host-discovery-script", f"{JOB_FILES}/discover-hosts.sh"]
    tolerations = [match for text in pods.tolerations if (match := _TOLERATION.fullmatch(text))]
    values = {
        **dataclasses.asdict(pods),
        "slots": pods.slots,
        "seconds": pods.seconds,
        "volumes": [text.partition(":")[::2] for text in pods.volumes],
        "secrets": [text.partition(":")[::2] for text in pods.secrets],
        "node_selectors": [text.partition("=")[::2] for text in pods.node_selectors],
        "tolerations": [(match["key"], match["value"], match["effect"]) for match in tolerations],
        "recipe": recipe,
        "elastic": elastic,
        "command": words,
        # Whether the pod that starts the ranks runs some: in an elastic job any worker may be lost, but not that pod.
        "both": pods.launcher_as_worker and not elastic,
    }
    text = render(f"{pods.kind}.yaml.j2", template, values)
    if template is not None:
        try:
            objects = list(yaml.safe_load_all(text))
        except yaml.YAMLError as error:
            raise RequestError(f"--template {template}: writes no YAML: {' '.join(str(error).split())}") from None
        if not objects or not all(isinstance(found, dict) and "kind" in found for found in objects):
            raise RequestError(f"--template {template}: expected objects of Kubernetes, each with its `kind`")
    return text


def default_name(recipe: str, stamp: str) -> str:
    """A job's name: of the recipe, and a time, which makes it unique."""
    room = NAME_LENGTH - len(stamp) - 1
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).lstrip("-0123456789")[:room].strip("-") or "hvdkit"
    return f"{slug}-{stamp}"
