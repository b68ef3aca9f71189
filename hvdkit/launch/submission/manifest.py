"""The manifest of a job on Kubernetes: Kubeflow's MPIJob (v2beta1) or TrainJob (Trainer v2), and its recipe.

Both operators start pods with sshd, and one pod with the names of all in /etc/mpi/hostfile; there `hvdkit train` starts
the ranks by mpirun. Fields: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go; kubeflow/trainer,
pkg/apis/trainer/v1alpha1.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import yaml

from hvdkit.launch.submission.kubernetes import HOME, JOB_FILES, RUNS, Pods, toleration
from hvdkit.recipe import yaml_files

Object = dict[str, Any]

# Of the images (Dockerfile, docker/): the user, sshd's port, and the program that runs sshd.
_USER_ID, _PORT, _NODE = 10001, 2222, "/usr/local/share/hvdkit/node.sh"
_RECIPE, _DISCOVER = "recipe.yaml", "discover-hosts.sh"
_GRACE_S = 60  # from SIGTERM to SIGKILL: `hvdkit train` writes a checkpoint and ends within 30 s
_TRAINER = "trainer.kubeflow.org"


def run_folder(pods: Pods) -> str:
    """The run's folder in the pods, on the claim of the results."""
    return f"{RUNS}/{pods.name}"


def manifest(pods: Pods, recipe: str, command: list[str], elastic: bool) -> str:
    """The job as YAML. It runs `command` with the recipe's file and the run's folder added; `recipe` is its YAML."""
    words = ["hvdkit", "train", f"{JOB_FILES}/{_RECIPE}", *command, "--out", run_folder(pods), "--resume"]
    if elastic:
        words += ["--launcher", "horovodrun", "--host-discovery-script", f"{JOB_FILES}/{_DISCOVER}"]
    objects = [_config_map(pods, recipe, elastic)]
    if pods.kind == "mpijob":
        objects.append(_mpi_job(pods, words, elastic))
    else:
        objects += [_runtime(pods), _train_job(pods, words)]
    head = f"""\
        # Written by `hvdkit submit`. Start it with `kubectl create -f`, remove it with `kubectl delete -f`.
        # The results are in the folder {pods.name} of the claim {pods.results}.
        """
    return textwrap.dedent(head) + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml_files.Dumper):
    """Long texts as blocks of lines, and no references between objects."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
# Words that are numbers to Kubernetes' parser (YAML 1.2), such as the label 12e3, and not to PyYAML, are quoted too.
for _kind, _pattern, _first in (
    ("float", r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", "-+.0123456789"),
    ("int", r"0o[0-7]+", "0"),
):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _metadata(pods: Pods) -> Object:
    return {"name": pods.name, **({"namespace": pods.namespace} if pods.namespace else {})}


_DISCOVERY = """\
#!/bin/sh
# The operator's script prints the pods that run, without their slots.
hosts=$(sh /etc/mpi/discover_hosts.sh) || exit
for host in $hosts; do echo "$host:{slots}"; done
"""


def _config_map(pods: Pods, recipe: str, elastic: bool) -> Object:
    data = {_RECIPE: recipe}
    if elastic:
        data[_DISCOVER] = _DISCOVERY.format(slots=pods.slots)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(pods), "data": data}


def _mpi_job(pods: Pods, command: list[str], elastic: bool) -> Object:
    # In an elastic job any worker may be lost, but not the pod that starts the others.
    both = pods.launcher_as_worker and not elastic
    policy = {"cleanPodPolicy": pods.clean_pods.capitalize(), "backoffLimit": pods.backoff_limit}
    if pods.seconds:
        policy["activeDeadlineSeconds"] = pods.seconds
    launcher = _pod(pods, "launcher", {"command": command}, ranks=both, job_files=True)
    worker = _pod(pods, "worker", _SSHD, ranks=True)
    workers = pods.nodes - both
    replicas = {"Launcher": _replicas(1, launcher, "Never")}  # the operator starts another one, backoffLimit times
    if workers:
        replicas["Worker"] = _replicas(workers, worker, "OnFailure")
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": _metadata(pods),
        "spec": {
            "slotsPerWorker": pods.slots,
            "runLauncherAsWorker": both,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "mpiImplementation": "OpenMPI",
            "sshAuthMountPath": f"{HOME}/.ssh",
            "runPolicy": policy,
            "mpiReplicaSpecs": replicas,
        },
    }


def _replicas(number: int, pod: Object, restart: str) -> Object:
    return {"replicas": number, "restartPolicy": restart, "template": {"spec": pod}}


def _runtime(pods: Pods) -> Object:
    """The TrainingRuntime of this one job: how its pods look."""
    both = pods.launcher_as_worker
    jobs: list[Object] = []
    if pods.nodes > 1 or not both:
        pod = _pod(pods, "node", _SSHD, ranks=True)
        jobs.append({"name": "node", "template": {"spec": _job(pod)}})
    launcher: Object = {
        "name": "launcher",
        "template": {
            "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": _job(_pod(pods, "node", {}, ranks=both, job_files=True)),
        },
    }
    if jobs:
        launcher["dependsOn"] = [{"name": "node", "status": "Ready"}]
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(pods),
        "spec": {
            "mlPolicy": {
                "numNodes": pods.nodes,
                "mpi": {
                    "numProcPerNode": pods.slots,
                    "mpiImplementation": "OpenMPI",
                    "sshAuthMountPath": f"{HOME}/.ssh",
                    "runLauncherAsNode": both,
                },
            },
            "template": {
                "spec": {
                    "network": {"publishNotReadyAddresses": True},
                    "failurePolicy": {"maxRestarts": pods.backoff_limit},
                    "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                    "replicatedJobs": [*jobs, launcher],
                }
            },
        },
    }


def _job(pod: Object) -> Object:
    """A Job's spec, which fails at once; the JobSet starts all pods again."""
    return {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **pod}}}


def _train_job(pods: Pods, command: list[str]) -> Object:
    spec: Object = {
        "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": pods.name},
        "trainer": {"command": command, "numNodes": pods.nodes, "numProcPerNode": pods.slots},
    }
    if pods.seconds:
        spec["activeDeadlineSeconds"] = pods.seconds
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods),
        "spec": spec,
    }


# A pod is ready, and the launcher started, as soon as sshd answers.
_SSHD: Object = {"command": [_NODE], "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 2}}


def _pod(pods: Pods, container: str, what: Object, ranks: bool, job_files: bool = False) -> Object:
    """A pod's spec. It has the resources of ranks if it runs `ranks`; `job_files` are mounted there."""
    volumes, mounts = _volumes(pods, job_files)
    container_: Object = {"name": container, "image": pods.image, **what}
    names = [name for name, colon, _ in (secret.partition(":") for secret in pods.secrets) if not colon]
    if names:
        container_["envFrom"] = [{"secretRef": {"name": name}} for name in names]
    if ranks and (resources := _resources(pods)):
        container_["resources"] = resources
    if mounts:
        container_["volumeMounts"] = mounts
    spec: Object = {
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {"fsGroup": _USER_ID},
        "containers": [container_],
    }
    if pods.pull_secret:
        spec["imagePullSecrets"] = [{"name": pods.pull_secret}]
    if pods.node_selectors:
        spec["nodeSelector"] = dict(label.split("=", 1) for label in pods.node_selectors)
    if pods.tolerations:
        spec["tolerations"] = [_toleration(toleration) for toleration in pods.tolerations]
    return {**spec, "volumes": volumes} if volumes else spec


def _resources(pods: Pods) -> Object:
    requests: Object = {}
    limits: Object = {}
    if pods.cpus_per_task:
        requests["cpu"] = str(pods.cpus_per_task * pods.slots)
    if pods.memory:
        requests["memory"] = limits["memory"] = pods.memory
    if pods.gpus_per_node:  # Kubernetes takes what is asked for from the limit
        limits[pods.gpu_resource] = str(pods.gpus_per_node)
    return {name: quantities for name, quantities in (("requests", requests), ("limits", limits)) if quantities}


def _volumes(pods: Pods, job_files: bool) -> tuple[list[Object], list[Object]]:
    """The volumes of a pod, and where they are mounted."""
    volumes: list[tuple[str, Object, str]] = []
    if job_files:
        volumes.append(("job", {"configMap": {"name": pods.name, "defaultMode": 0o755}}, JOB_FILES))
    volumes.append(("results", {"persistentVolumeClaim": {"claimName": pods.results}}, RUNS))
    if pods.shm:
        volumes.append(("shm", {"emptyDir": {"medium": "Memory", "sizeLimit": pods.shm}}, "/dev/shm"))
    for number, (claim, _, path) in enumerate(volume.partition(":") for volume in pods.volumes):
        volumes.append((f"volume-{number}", {"persistentVolumeClaim": {"claimName": claim}}, path))
    for number, (secret, _, path) in enumerate(secret.partition(":") for secret in pods.secrets):
        if path:
            volumes.append((f"secret-{number}", {"secret": {"secretName": secret}}, path))
    return [{"name": name, **source} for name, source, _ in volumes], [
        {"name": name, "mountPath": path} for name, _, path in volumes
    ]


def _toleration(text: str) -> Object:
    key, value, effect = toleration(text)
    of_value = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
    return {"key": key, **of_value, **({"effect": effect} if effect else {})}
