"""What a job asks Kubernetes for, and what is wrong with it before the cluster sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from hvdkit.errors import Faults

# The user's folder in the images (Dockerfile), and where the claim of the results and the job's own files are mounted.
HOME = "/home/hvdkit"
RUNS, JOB_FILES = f"{HOME}/runs", "/etc/hvdkit"
_TAKEN = (RUNS, JOB_FILES, f"{HOME}/.ssh", "/etc/mpi", "/dev/shm")
KINDS = ("mpijob", "trainjob")
CLEAN = ("running", "all", "none")  # pods that the operator deletes when the job has ended
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
NAME_LENGTH = 40  # with a default name, all names that operators make of it have at most 63 characters
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, as services and so MPIJobs are named
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")  # RFC 1123, as other objects
_KEY = re.compile(r"([a-z0-9]([-.a-z0-9]{0,250}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_SIZE = re.compile(r"[1-9]\d{0,14}([KMGTPE]i|[kMGTPE])?", re.ASCII)
_PATH = re.compile(r"(/[\w.@+-]+)+", re.ASCII)
_IMAGE = re.compile(r"[a-z0-9][\w./:-]{0,250}(@sha256:[0-9a-f]{64})?", re.ASCII)
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d\d)(?::(\d\d))?|(\d{1,7})", re.ASCII)


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
        faults = Faults()
        if self.kind not in KINDS:
            faults.append(f"--kind {self.kind}: expected {' or '.join(KINDS)}")
        elif elastic and self.kind == "trainjob":
            faults.append(
                "--kind trainjob: expected a recipe without `elastic`, or --kind mpijob, whose pods may change"
            )
        faults += self._of_numbers()
        faults += self._of_names()
        for option, given, pattern, expected in (
            ("--memory", self.memory, _SIZE, "a size such as 16Gi"),
            ("--shm", self.shm, _SIZE, "a size such as 2Gi"),
            ("--gpu-resource", self.gpu_resource, _KEY, "a resource such as nvidia.com/gpu"),
            ("--image", self.image, _IMAGE, "an image such as registry.example.org/hvdkit:pytorch"),
        ):
            if given is not None and not pattern.fullmatch(given):
                faults.append(f"{option} {given!r}: expected {expected}")
        if self.time is not None and not self.seconds:
            faults.append(f"--time {self.time}: expected minutes, HH:MM:SS or D-HH:MM:SS")
        if self.clean_pods not in CLEAN:
            faults.append(f"--clean-pods {self.clean_pods}: expected {', '.join(CLEAN)}")
        faults += self._of_places()
        for text in self.node_selectors:
            key, equals, value = text.partition("=")
            if not (equals and _KEY.fullmatch(key) and _VALUE.fullmatch(value)):
                faults.append(f"--node-selector {text!r}: expected KEY=VALUE, a label of nodes")
        for text in self.tolerations:
            taint, wanted, effect = toleration(text)
            if not (_KEY.fullmatch(taint) and _VALUE.fullmatch(wanted or "") and effect in (None, *EFFECTS)):
                faults.append(f"--toleration {text!r}: expected KEY[=VALUE][:EFFECT], EFFECT {', '.join(EFFECTS)}")
        return faults

    def _of_numbers(self) -> Faults:
        faults = Faults()
        numbers = (("--nodes", self.nodes, 1), ("--cpus-per-task", self.cpus_per_task, 1),
                   ("--gpus-per-node", self.gpus_per_node, 0), ("--backoff-limit", self.backoff_limit, 0))  # fmt: skip
        for option, number, least in numbers:
            if number is not None and not least <= number <= 10**6:
                faults.append(f"{option} {number}: expected {least} or more")
        if self.nodes >= 1 and self.tasks % self.nodes:
            faults.append(f"-np {self.tasks}: expected a multiple of --nodes {self.nodes}, with as many ranks on each")
        return faults

    def _of_names(self) -> Faults:
        faults = Faults()
        # The longest names that the operators make of it: of the last worker, and of JobSet's pods.
        ending = f"-worker-{self.nodes - 1}" if self.kind == "mpijob" else "-launcher-0-0-xxxxx"
        if not _LABEL.fullmatch(f"{self.name}{ending}"):
            faults.append(
                f"--name {self.name!r}: expected at most {63 - len(ending)} characters, lower-case letters, digits and "
                "'-', beginning with a letter; the operator names pods after it"
            )
        if self.namespace is not None and not _LABEL.fullmatch(self.namespace):
            faults.append(f"--namespace {self.namespace!r}: expected lower-case letters, digits and '-'")
        for option, name in (("--results", self.results), ("--pull-secret", self.pull_secret)):
            if name is not None and not _is_name(name):
                faults.append(f"{option} {name!r}: expected the name of an object, of lower-case letters, digits, '-'")
        return faults

    def _of_places(self) -> Faults:
        faults = Faults()
        seen = set(_TAKEN)
        given = [("--volume", volume) for volume in self.volumes] + [("--secret", secret) for secret in self.secrets]
        for option, mount in given:
            name, colon, path = mount.partition(":")
            alone = option == "--secret" and not colon
            if not _is_name(name) or not (alone or _PATH.fullmatch(path)):
                expected = "CLAIM:/PATH" if option == "--volume" else "NAME or NAME:/PATH"
                faults.append(f"{option} {mount!r}: expected {expected}")
            elif path in seen:
                faults.append(f"{option} {mount!r}: {path} is taken; expected another path")
            elif path:
                seen.add(path)
        return faults


def toleration(text: str) -> tuple[str, str | None, str | None]:
    """Key, value and effect of KEY[=VALUE][:EFFECT]; None for a part that is not there."""
    rest, colon, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    return key, value if equals else None, effect if colon else None


def default_name(recipe: str, stamp: str) -> str:
    """A job's name: of the recipe, and a time, which makes it unique."""
    room = NAME_LENGTH - len(stamp) - 1
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).lstrip("-0123456789")[:room].strip("-") or "hvdkit"
    return f"{slug}-{stamp}"


def _is_name(text: str) -> bool:
    return len(text) <= 253 and _NAME.fullmatch(text) is not None
