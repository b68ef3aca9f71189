"""Kubeflow's MPIJob v2beta1, as its operator checks it.

Fields and their defaults: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go and default.go; the rules:
pkg/apis/kubeflow/validation/validation.go. Specs of pods are Kubernetes' own.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Int32 = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SchedulingPolicy(Strict):
    minAvailable: Int32 | None = None
    queue: str | None = None
    minResources: dict[str, str] | None = None
    priorityClass: str | None = None
    scheduleTimeoutSeconds: Int32 | None = None


class RunPolicy(Strict):
    cleanPodPolicy: Literal["None", "Running", "All"] = "None"
    ttlSecondsAfterFinished: Int32 | None = None
    activeDeadlineSeconds: Annotated[int, Field(strict=True, gt=0)] | None = None
    backoffLimit: Int32 | None = None
    schedulingPolicy: SchedulingPolicy | None = None
    suspend: bool = False
    managedBy: Literal["kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue"] | None = None


class Template(Strict):
    metadata: dict[str, Any] | None = None
    spec: dict[str, Any]

    @model_validator(mode="after")
    def has_containers(self) -> Template:
        assert self.spec.get("containers"), "must define at least one container"
        return self


class ReplicaSpec(Strict):
    replicas: Int32
    template: Template
    restartPolicy: Literal["Never", "OnFailure"]


class Replicas(Strict):
    Launcher: ReplicaSpec
    Worker: ReplicaSpec | None = None

    @model_validator(mode="after")
    def has_numbers(self) -> Replicas:
        assert self.Launcher.replicas == 1, "Launcher: must be 1"
        assert self.Worker is None or self.Worker.replicas >= 1, "Worker: must be greater than or equal to 1"
        return self


class Spec(Strict):
    slotsPerWorker: Int32 = 1
    runLauncherAsWorker: bool = False
    runPolicy: RunPolicy
    mpiReplicaSpecs: Replicas
    sshAuthMountPath: Annotated[str, Field(min_length=1)] = "/root/.ssh"
    launcherCreationPolicy: Literal["AtStartup", "WaitForWorkersReady"] = "AtStartup"
    mpiImplementation: Literal["OpenMPI", "Intel", "MPICH"] = "OpenMPI"


class Metadata(Strict):
    name: str
    namespace: str | None = None
    labels: dict[str, str] | None = None


class MPIJob(Strict):
    apiVersion: Literal["kubeflow.org/v2beta1"]
    kind: Literal["MPIJob"]
    metadata: Metadata
    spec: Spec

    @model_validator(mode="after")
    def names_pods(self) -> MPIJob:
        worker = self.spec.mpiReplicaSpecs.Worker
        longest = f"{self.metadata.name}-worker-{(worker.replicas if worker else 1) - 1}"
        assert len(longest) <= 63 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", longest), (
            f"no DNS-1035 label: {longest}"
        )
        return self

    def hostfile(self) -> str:
        """The host file that the operator writes into the launcher's pod (newConfigMap of its controller, Open MPI)."""
        name, workers = self.metadata.name, self.spec.mpiReplicaSpecs.Worker
        pods = [f"{name}-launcher"] if self.spec.runLauncherAsWorker else []
        pods += [f"{name}-worker-{number}" for number in range(workers.replicas if workers else 0)]
        domain = f"{name}.{self.metadata.namespace or 'default'}.svc"
        return "".join(f"{pod}.{domain} slots={self.spec.slotsPerWorker}\n" for pod in pods)
