"""`hvdkit submit --to kubernetes`: what it writes, by Kubernetes' schemas and the operators' rules; what it refuses."""

from __future__ import annotations

import json
import re
import stat
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime as TrainingRuntime
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob

from hvdkit.commands.submit import default_name, manifest, pod_faults
from hvdkit.commands.submit_request import SubmitRequest
from hvdkit.recipe import schema
from tests.cluster.mpijob import MPIJob
from tests.inside import call

pytestmark = pytest.mark.check

RECIPE = "resnet20-digits"
ASKED = ["--to", "kubernetes", "--image", "example.org:5000/hvdkit:pytorch", "--results", "runs"]
KUBERNETES = "1.31.0"


def asked(**options: Any) -> SubmitRequest:
    """A request that has passed the checks of its options."""
    chosen = {"recipe": RECIPE, "to": "kubernetes", "image": "hvdkit", "results": "runs", "name": "digits", **options}
    return SubmitRequest.of(chosen)


@cache
def kubernetes(kind: str) -> jsonschema.Draft202012Validator:
    """Kubernetes' own schema of a kind, which allows no unknown field."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{KUBERNETES}-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    return jsonschema.Draft202012Validator({**definitions, "$ref": f"#/$defs/io.k8s.api.core.v1.{kind}"})


def test_a_command_takes_the_place_of_training(tmp_path: Path) -> None:
    options = [*ASKED, "-np", "4", "--name", "mine", "--overwrite", "--script", "job.yaml"]
    for words, run, about in (
        (["compare", RECIPE, "--rounds", "2"], ["--resume", "/etc/hvdkit/recipe.yaml", "--rounds", "2"], True),
        (["/app/mine.py", "--lr", "0.1"], ["-np", "4", "--overwrite", "/app/mine.py", "--lr", "0.1"], False),
    ):
        framework = [] if about else ["--framework", "pytorch"]
        done = call(tmp_path, "submit", *options, *framework, "--", *words)
        assert done.returncode == 0, done.stderr
        files, job = check((tmp_path / "job.yaml").read_text())
        command = pods_of(job)["Launcher"]["containers"][0]["command"]
        kind = words[:1] if about else ["launch", *framework]
        assert command == ["hvdkit", *kind, "--out", "/home/hvdkit/runs/mine", *run]
        assert ("recipe.yaml" in files["data"]) == about


def pods_of(job: dict[str, Any]) -> dict[str, Any]:
    """The specs of a job's pods, by the name of their replicas."""
    if job["kind"] == "MPIJob":
        return {name: each["template"]["spec"] for name, each in job["spec"]["mpiReplicaSpecs"].items()}
    jobs = job["spec"]["template"]["spec"]["replicatedJobs"]
    return {each["name"]: each["template"]["spec"]["template"]["spec"] for each in jobs}


def check(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest, if all are as Kubernetes and the operators want them."""
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        if each["kind"] == "MPIJob":
            MPIJob.model_validate(each)
        elif each["kind"] == "ConfigMap":
            kubernetes("ConfigMap").validate(each)
        else:
            model = {"TrainingRuntime": TrainingRuntime, "TrainJob": TrainJob}[each["kind"]]
            found = model.from_dict(each)
            assert found is not None and found.to_dict() == each, "a field that is not of this kind"
        if each["kind"] in ("MPIJob", "TrainingRuntime"):
            for spec in pods_of(each).values():
                kubernetes("PodSpec").validate(spec)
                mounted = [mount["name"] for mount in spec["containers"][0].get("volumeMounts", [])]
                assert mounted == [volume["name"] for volume in spec.get("volumes", [])]
    return objects


def written(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = call(folder, "submit", RECIPE, *ASKED, *words, "--script", "job.yaml")
    assert done.returncode == 0, done.stderr
    return check((folder / "job.yaml").read_text())


def test_a_manifest_that_a_person_can_read(tmp_path: Path) -> None:
    words = ["epochs=2", "-np", "8", "--nodes", "2", "--name", "digits", "--namespace", "lab", "--gpus-per-node", "4",
             "--cpus-per-task", "3", "--memory", "64Gi", "--shm", "8Gi", "--time", "1-12:00:00", "--volume",
             "imagenet:/data", "--secret", "wandb", "--secret", "keys:/etc/keys", "--pull-secret", "registry",
             "--node-selector", "gpu=a100", "--toleration", "nvidia.com/gpu:NoSchedule", "--clean-pods", "all",
             "--backoff-limit", "7"]  # fmt: skip
    config, job = written(tmp_path, *words)
    text = (tmp_path / "job.yaml").read_text()
    assert text.startswith("# Written by `hvdkit submit`.") and "  recipe.yaml: |\n    name: resnet20-digits\n" in text
    (tmp_path / "recipe.yaml").write_text(config["data"]["recipe.yaml"])
    assert schema.load(tmp_path / "recipe.yaml").epochs == 2, "the resolved recipe travels with the job"
    assert job["metadata"] == config["metadata"] == {"name": "digits", "namespace": "lab"}
    spec = job["spec"]
    assert (spec["slotsPerWorker"], spec["runLauncherAsWorker"]) == (4, True)
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert spec["runPolicy"] == {"cleanPodPolicy": "All", "backoffLimit": 7, "activeDeadlineSeconds": 129600}
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 1, "the launcher's pod is the other of the two"
    launcher, worker = pods_of(job)["Launcher"], pods_of(job)["Worker"]
    assert launcher["containers"][0]["command"] == [
        "hvdkit", "train", "/etc/hvdkit/recipe.yaml", "--framework", "pytorch", "-np", "8", "--out",
        "/home/hvdkit/runs/digits", "--resume",
    ]  # fmt: skip
    assert worker["containers"][0]["command"] == ["/usr/local/share/hvdkit/node.sh"]
    for pod in (launcher, worker):
        [container] = pod["containers"]
        assert container["image"] == "example.org:5000/hvdkit:pytorch"
        assert container["resources"] == {
            "requests": {"cpu": "12", "memory": "64Gi"},
            "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
        }
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
        assert {"secretName": "keys"} in [volume.get("secret") for volume in pod["volumes"]]
        assert {"name": "results", "mountPath": "/home/hvdkit/runs"} in container["volumeMounts"]
        assert {"claimName": "imagenet"} in [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert (pod["nodeSelector"], pod["imagePullSecrets"]) == ({"gpu": "a100"}, [{"name": "registry"}])


def test_one_pod_more_starts_the_ranks_where_it_runs_none(tmp_path: Path) -> None:
    _, job = written(tmp_path, "-np", "4", "--nodes", "2", "--memory", "1Gi", "--no-launcher-as-worker")
    assert job["spec"]["runLauncherAsWorker"] is False
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    assert "resources" not in pods_of(job)["Launcher"]["containers"][0]
    assert MPIJob.model_validate(job).hostfile().count(" slots=2\n") == 2


def test_an_elastic_job_asks_the_operator_for_hosts(tmp_path: Path) -> None:
    config, job = written(tmp_path, "elastic={min_np: 2, max_np: 8}", "-np", "4", "--nodes", "2")
    launcher = pods_of(job)["Launcher"]
    assert launcher["containers"][0]["command"][-4:] == [
        "--launcher", "horovodrun", "--host-discovery-script", "/etc/hvdkit/discover-hosts.sh",
    ]  # fmt: skip
    assert job["spec"]["runLauncherAsWorker"] is False, "the pod that starts the others cannot be lost"
    script = config["data"]["discover-hosts.sh"]
    assert script.startswith("#!/bin/sh\n") and "/etc/mpi/discover_hosts.sh" in script and '"$host:2"' in script
    assert [volume["configMap"]["defaultMode"] & 0o555 for volume in launcher["volumes"] if "configMap" in volume] == [
        0o555
    ]


def test_a_train_job_with_its_runtime(tmp_path: Path) -> None:
    _, runtime, job = written(tmp_path, "--kind", "trainjob", "-np", "8", "--nodes", "2", "--time", "90")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert (job["spec"]["trainer"]["numNodes"], job["spec"]["activeDeadlineSeconds"]) == (2, 5400)
    policy = runtime["spec"]["mlPolicy"]
    assert (policy["numNodes"], policy["mpi"]["numProcPerNode"], policy["mpi"]["runLauncherAsNode"]) == (2, 4, True)
    assert list(pods_of(runtime)) == ["node", "launcher"]


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
def test_a_misspelt_field_is_found(kind: str) -> None:
    text = manifest(asked(np=4, nodes=2, kind=kind), "name: x\n", [], elastic=False)
    for right, wrong in (
        ("tcpSocket", "tcpsocket"),
        ("claimName", "claim"),
        ("kind: ConfigMap", "kind: ConfigMap\nx: 1"),
    ):
        assert right in text
        with pytest.raises((jsonschema.ValidationError, ValueError, AssertionError)):
            check(text.replace(right, wrong))


labels = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,8})?", fullmatch=True)
paths = st.from_regex(r"(/[a-z0-9._-]{1,9}){1,3}", fullmatch=True)
keys = st.sampled_from(["gpu", "nvidia.com/gpu.product", "topology.kubernetes.io/zone", "Key_1"])
sizes = st.from_regex(r"[1-9][0-9]{0,3}([KMGT]i|[kMGT])?", fullmatch=True)


@st.composite
def requests(draw: st.DrawFn) -> SubmitRequest:
    nodes = draw(st.integers(1, 40))
    taken = draw(st.lists(paths, unique=True, max_size=3))
    kind, gpus = draw(st.sampled_from(["mpijob", "trainjob"])), draw(st.none() | st.integers(0, 16))
    return asked(
        name=draw(labels),
        image=draw(st.sampled_from(["hvdkit", "r.example.org:5000/a/hvdkit:1.0", "hvdkit@sha256:" + "0a" * 32])),
        results=draw(labels),
        np=nodes * draw(st.integers(1, 16)),
        nodes=nodes,
        kind=kind,
        namespace=draw(st.none() | labels),
        cpus_per_task=draw(st.none() | st.integers(1, 64)),
        gpus_per_node=gpus,
        gpu_resource=draw(st.sampled_from(["nvidia.com/gpu", *(["amd.com/gpu"] if gpus else [])])),
        memory=draw(st.none() | sizes),
        shm=draw(st.none() | sizes),
        time=draw(
            st.none() | st.from_regex(r"[1-9][0-9]{0,3}|[0-9]-[0-9]{1,2}:[0-5][1-9](:[0-5][0-9])?", fullmatch=True)
        ),
        volumes=[f"{draw(labels)}:{path}" for path in taken[:2]],
        secrets=[draw(st.sampled_from([f"{draw(labels)}:{path}", draw(labels)])) for path in taken[2:]],
        pull_secret=draw(st.none() | labels),
        node_selectors=[f"{key}={draw(labels)}" for key in draw(st.lists(keys, unique=True, max_size=2))],
        tolerations=draw(st.lists(st.sampled_from(["gpu", "gpu=a100", "gpu=:NoExecute", "x:NoSchedule"]))),
        clean_pods=draw(st.sampled_from(["running", *(["all", "none"] if kind == "mpijob" else [])])),
        backoff_limit=draw(st.integers(0, 9)),
        launcher_as_worker=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(requests(), st.booleans(), st.text(max_size=40))
def test_whatever_passes_the_checks_is_a_manifest(pods: SubmitRequest, elastic: bool, word: str) -> None:
    elastic = elastic and pods.kind == "mpijob"
    assert not pod_faults(pods, elastic)
    word = re.sub(r"[^\x20-\x7e\xa0-\ud7ff]", "", word)
    objects = check(manifest(pods, "name: x\n", ["--rival", word], elastic))
    assert {each["metadata"]["name"] for each in objects} == {pods.name}
    [command] = re.findall(r"(?s)command.*", json.dumps(objects[-1]["spec"], ensure_ascii=False))[:1]
    assert json.dumps(word, ensure_ascii=False) in command, "one word of the command, whatever is in it"
    if pods.kind == "mpijob":
        hosts = MPIJob.model_validate(objects[-1]).hostfile().splitlines()
        assert len(hosts) == pods.nodes and all(host.endswith(f" slots={pods.np // pods.nodes}") for host in hosts)


@given(st.text(max_size=80))
def test_names_are_checked_as_the_operator_does(name: str) -> None:
    """What passes is a DNS-1035 label behind which the longest ending fits."""
    pods = asked(name=name, np=100, nodes=100)
    label = re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", f"{name}-worker-99") and len(name) <= 63 - len("-worker-99")
    assert bool(pod_faults(pods, elastic=False)) == (not label)


@given(st.text())
def test_a_default_name_is_one(recipe: str) -> None:
    for kind in ("mpijob", "trainjob"):
        pods = asked(name=default_name(recipe, "1231-235959"), np=1000, nodes=1000, kind=kind)
        assert not pod_faults(pods, elastic=False)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--name", "1-job"], "--name '1-job': expected at most 54 characters"),
        (["--name", "../../x"], "--name '../../x': expected"),
        (["--namespace", "a b"], "--namespace 'a b': expected"),
        (["--image", "$(id)"], "--image '$(id)': expected an image"),
        (["--image", "x\ny"], "--image 'x"),
        (["--results", "a/b"], "--results 'a/b': expected the name"),
        (["--memory", "16 GB"], "--memory '16 GB': expected a size"),
        (["--shm", "-1Gi"], "--shm '-1Gi': expected a size"),
        (["--time", "soon"], "--time 'soon': expected minutes"),
        (["--volume", "claim"], "--volume 'claim': expected CLAIM:/PATH"),
        (["--volume", "a:/x", "--secret", "b:/x"], "'b:/x': /x is taken"),
        (["--volume", "a:/dev/shm"], "/dev/shm is taken"),
        (["--secret", "TOKEN=abc"], "--secret 'TOKEN=abc': expected NAME"),
        (["--node-selector", "gpu"], "--node-selector 'gpu': expected KEY=VALUE"),
        (["--toleration", "gpu:Never"], "--toleration 'gpu:Never': expected"),
        (["--clean-pods", "some"], "--clean-pods 'some': expected running"),
        (["--kind", "trainjob", "--clean-pods", "all"], "--clean-pods: expected --kind mpijob with it"),
        (["--gpu-resource", "amd.com/gpu"], "--gpu-resource: expected --gpus-per-node with it"),
        (["--kind", "pod"], "--kind 'pod': expected mpijob or trainjob"),
        (["--kind", "trainjob", "elastic={max_np: 4}"], "--kind trainjob: expected a recipe without `elastic`"),
        (["elastic={min_np: 2, max_np: 4}"], "-np 1: expected 2 to 4"),
        (["--partition", "gpu"], "--partition: an option for --to slurm, and this job is for kubernetes"),
        (["--line=-x", "--out", "r"], "--out: an option for --to slurm"),
        (["--to", "slurm"], "--image: an option for --to kubernetes, and this job is for slurm"),
    ],
)
def test_wrong_requests_leave_nothing(asked: list[str], said: str, tmp_path: Path) -> None:
    done = call(tmp_path, "submit", RECIPE, *ASKED, *asked)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_an_image_and_a_claim_are_needed(tmp_path: Path) -> None:
    done = call(tmp_path, "submit", RECIPE, "--to", "kubernetes")
    assert (done.returncode, done.stderr.startswith("--image, --results: expected")) == (2, True), done.stderr


# A kubectl that notes its command lines, creates what it is given, and refuses the kind in REFUSED.
KUBECTL = """\
#!{python}
import os, pathlib, sys, yaml
with open("calls", "a") as calls:
    print(sys.argv[1:], file=calls)
if sys.argv[1] == "create":
    [path] = [word.partition("=")[2] for word in sys.argv if word.startswith("--filename=")]
    for each in yaml.safe_load_all(pathlib.Path(path).read_text()):
        if each["kind"] == os.environ.get("REFUSED"):
            sys.exit(os.environ["SAYS"])
        print(each["kind"].lower() + "/" + each["metadata"]["name"])
"""


def applied(folder: Path, *asked: str, **environment: str) -> Any:
    program = folder / "bin" / "kubectl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(KUBECTL.format(python=sys.executable))
    program.chmod(stat.S_IRWXU)
    return call(folder, "submit", RECIPE, *ASKED, "--apply", *asked, PATH=str(program.parent), **environment)


def test_apply_creates_the_job(tmp_path: Path) -> None:
    done = applied(tmp_path, "--name", "digits", "--namespace", "lab")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"written to {tmp_path}/runs/digits.yaml",
        "mpijob/digits: its results go to the folder digits of the claim runs",
        "follow it with: kubectl logs -n lab -f job/digits-launcher",
    ]
    file = f"--filename={tmp_path}/runs/digits.yaml"
    assert (tmp_path / "calls").read_text().splitlines() == [
        str(["create", "--output=name", "--namespace", "lab", file])
    ]


def test_what_the_cluster_refuses_leaves_nothing(tmp_path: Path) -> None:
    says = 'error: resource mapping not found for name: "digits": no matches for kind "MPIJob"'
    done = applied(tmp_path, "--name", "digits", REFUSED="MPIJob", SAYS=says)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"--apply: the cluster refuses the job: {says.removeprefix('error: ')}\n"
    assert (tmp_path / "calls").read_text().splitlines()[1:] == [str(["delete", "--wait=false", "configmap/digits"])]
    assert not (tmp_path / "runs").exists()


def test_without_kubectl_or_a_login(tmp_path: Path) -> None:
    done = applied(tmp_path, REFUSED="ConfigMap", SAYS="error: You must be logged in to the server (Unauthorized)")
    assert done.stderr == "--apply: the cluster refuses the job: You must be logged in to the server (Unauthorized)\n"
    done = call(tmp_path, "submit", RECIPE, *ASKED, "--apply", PATH=str(tmp_path))
    assert (done.returncode, done.stderr.startswith("--apply: kubectl cannot be run (No such file")) == (2, True)
    assert "leave out --apply" in done.stderr and str(tmp_path) not in done.stderr, "no file that is not there"
    assert not (tmp_path / "runs").exists()


def test_a_note_lists_what_the_image_or_a_volume_must_have(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("")
    told = "the image or a volume must have, as the manifest has the recipe alone: "
    script = f"model.script {tmp_path}/net.py with helper.py beside it"
    recipe = schema.load(Path(__file__).parents[1] / "recipes" / f"{RECIPE}.yaml").model_dump(mode="json")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe | {"model": {"name": "resnet20", "weights": "/w/w.pt"}}))
    for asked, line in (
        ([RECIPE, "model={name: own, script: net.py}"], [told + script]),
        (["mine.yaml"], [told + "model.weights /w/w.pt"]),
        (["mine.yaml", "--volume", "claim:/w"], []),
        (["mine.yaml", "--volume", "claim:/wide"], [told + "model.weights /w/w.pt"]),
        ([RECIPE], []),
    ):
        done = call(tmp_path, "submit", *asked, *ASKED, "--script", "job.yaml", "--overwrite")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1:-1] == line, done.stdout


@pytest.mark.parametrize("text", ["12e3", "1E5", "0o17", "1_000", "007", "1.5", "on", "null", "0x1F", "2026-01-01"])
def test_words_stay_words_for_kubernetes(text: str) -> None:
    """A YAML 1.2 parser takes 12e3, such as a commit's, for a number; quoted words are texts for every parser."""
    made = asked(np=2, node_selectors=[f"commit={text}"])
    written = manifest(made, "name: x\n", [], elastic=False)
    assert f'"commit": "{text}"' in written, written
