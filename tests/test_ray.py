"""`--launcher ray` on a real Ray cluster of two nodes, and what it says where there is none."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdkit.launch.launchers import ray as launcher
from tests import hygiene, paced
from tests.conftest import ROOT, Hvdkit

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

RECIPE = ["resnet20-digits", "model.name=resnet8", "threads=1", "log_every=1"]


@dataclass
class Cluster:
    """Two nodes; ranks of the one called `second` see nothing of the other's folder `apart`, if there is one."""

    process: subprocess.Popen[str]
    second: str
    apart: Path | None

    def order(self, what: str) -> None:
        """`kill` the second node, or `add` one in its place, if it was killed."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: make cluster-check")
    apart = tmp_path_factory.mktemp("apart") if os.geteuid() == 0 else None
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "cluster" / "ray_cluster.py"), *([str(apart)] if apart else [])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout
        said = process.stdout.readline().split()
        assert len(said) == 3, "Ray does not start"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", said[0])
            patch.setenv("RAY_API_SERVER_ADDRESS", f"http://{said[2]}")
            yield Cluster(process, said[1], apart)
        process.stdin.close()
        process.wait(hygiene.patience(60))


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + hygiene.patience(120)
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)


@contextmanager
def training(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run of four ranks that would go on for long, once it has made some steps; nothing of it is left at the end."""
    run = folder / "run"
    train = ["train", *RECIPE, "epochs=1000", *options, "--framework", "mxnet", "-np", "4", "--launcher", "ray"]
    with hygiene.marking() as mark:
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdkit", *train, "--out", str(run)],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=folder,
            env={**os.environ, hygiene.MARK: mark}, start_new_session=True,
        )  # fmt: skip
    try:
        metrics = run / "metrics.jsonl"
        wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 2))
        assert process.poll() is None, process.communicate()[1]
        yield process
        wait_for(lambda: not processes(run))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        hygiene.kill_started_by(mark)


def ranks(run: Path) -> dict[int, int]:
    """The processes of the run's ranks, by rank."""
    return {int(name.removeprefix("rank-")): pid for name, pid in processes(run, "rank-").items()}


def processes(run: Path, kind: str = "") -> dict[str, int]:
    """The processes of the run's ranks by the names of their files, which begin with `kind`; no agents."""
    found, mark = {}, b"\0HVDKIT_TRACE="
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            name = environment.partition(mark)[2].partition(b"\0")[0].decode()
            if str(run).encode() in words and name and name.startswith(kind):
                found[name] = int(entry.name)
    return found


def parent(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status and what was said on standard error."""
    _, said = process.communicate(timeout=hygiene.patience(60))
    return process.returncode, said


def test_four_ranks_train_on_two_nodes(cluster: Cluster, hvdkit: Hvdkit, tmp_path: Path) -> None:
    train = ["train", *RECIPE, "steps=3", "--framework", "pytorch", "-np", "4", "--launcher", "ray", "--out", "run"]
    done = hvdkit(*train, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stderr, "progress"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["launcher"], result["np"]) == ("ray", 4)
    ends = json.loads((tmp_path / "run" / "logs" / "exits.json").read_text())
    first = ends[0]["host"]
    assert [(end["host"], end["exit_code"]) for end in ends] == [(first, 0)] * 2 + [(f"{first}-2", 0)] * 2


def test_a_program_runs_on_two_nodes(cluster: Cluster, hvdkit: Hvdkit) -> None:
    program = ROOT / "tests" / "launched" / "program.py"
    done = hvdkit("launch", "--launcher", "ray", "-np", 4, "--out", "run", program, "none", timeout=180)
    assert done.returncode == 0 and "[3] rank 3 of 4 none" in done.stdout, done.stderr
    done = hvdkit("launch", "--launcher", "ray", "-np", 4, "--out", "failed", program, "exits", timeout=180)
    assert (done.returncode, "rank 1 on" in done.stderr, "exit code 3" in done.stderr) == (3, True, True), done.stderr


def submitted(hvdkit: Hvdkit, *words: object) -> str:
    """Hand a job over; its name."""
    done = hvdkit("submit", "--to", "ray", "-np", 4, "--out", "run", "--apply", *words, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^job (\S+): its results go to ", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1]


def asked(what: str, name: str) -> str:
    """What Ray says of a job: its `status`, its `logs`; or it is to `stop`."""
    command = [Path(sys.executable).with_name("ray"), "job", what, name]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=hygiene.patience(120)).stdout


def test_a_program_is_a_job(cluster: Cluster, hvdkit: Hvdkit, tmp_path: Path) -> None:
    name = submitted(hvdkit, "--", ROOT / "tests" / "launched" / "program.py", "none")
    wait_for(lambda: any(end in asked("status", name) for end in ("succeeded", "failed")))
    assert "succeeded" in asked("status", name), asked("logs", name)
    told = json.loads((tmp_path / "run" / "launch.json").read_text())
    assert (told["launcher"], told["np"], told["failure"]) == ("ray", 4, None)


def test_a_job_that_is_stopped_leaves_nothing_and_goes_on_where_it_stopped(
    cluster: Cluster, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    name = submitted(hvdkit, *RECIPE, "epochs=1000", "checkpoint.every_steps=3", "--framework", "mxnet")
    newest = run / "checkpoints" / "last" / "model.safetensors"
    wait_for(lambda: newest.exists() or "failed" in asked("status", name))
    assert "was stopped" in asked("stop", name), asked("logs", name)
    wait_for(lambda: not processes(run))
    with subprocess.Popen(["bash", tmp_path / "run.sh"], stderr=subprocess.PIPE, text=True) as again:
        assert again.stderr
        assert any("continues from step" in line for line in again.stderr)
        again.send_signal(signal.SIGINT)
    wait_for(lambda: not processes(run))


def test_a_node_that_does_not_see_the_folder_is_named(cluster: Cluster, hvdkit: Hvdkit) -> None:
    """Before a rank trains: rank 0, which would write the results, is to run there."""
    if cluster.apart is None:
        pytest.skip("needs root, to give a node a file system of its own")
    run, first = cluster.apart / "run", cluster.second.partition("-")[0]
    others = f"{first}-2" if cluster.second == first else first
    train = ["train", *RECIPE, "steps=3", "checkpoint={}", "--framework", "mxnet", "-np", "4", "--launcher", "ray"]
    done = hvdkit(*train, "-H", f"{cluster.second}:2,{others}:2", "--out", str(run), timeout=120)
    assert done.returncode == 2, done.stderr
    assert re.search(r"not the launcher's folder; give --out a folder that all hosts share$", done.stderr), done.stderr
    assert not (run / "metrics.jsonl").exists()


def test_a_hang_is_named_with_the_collective_and_the_nodes(cluster: Cluster, hvdkit: Hvdkit, tmp_path: Path) -> None:
    recipe = ROOT / "tests" / "debugging" / "recipe.yaml"
    train = ["train", str(recipe), "model.script=hang_in_the_middle.py", "-np", "4", "--launcher", "ray"]
    done = hvdkit(*train, "--stall-timeout", "30", "--out", "run", timeout=180)
    assert done.returncode == 1, done.stderr
    named = r"allreduce 'norm' waits: rank 0 entered it, rank 1 on (\S+), rank 2 on \1-2, rank 3 on \1-2 did not"
    assert re.search(named, done.stderr), done.stderr
    stacks = (tmp_path / "run" / "logs" / "stacks.txt").read_text()
    assert "hang_in_the_middle.py" in stacks
    assert [line[:6] for line in stacks.splitlines() if line.startswith("rank")] == [f"rank {n}" for n in range(4)]


def test_a_rank_that_is_killed_is_named_with_its_node(cluster: Cluster, tmp_path: Path) -> None:
    with training(tmp_path) as process:
        os.kill(ranks(tmp_path / "run")[3], signal.SIGKILL)
        status, said = ended(process)
        assert status == 1 and "rank 3 on " in said and "-2 was killed by SIGKILL" in said, said


def test_an_actor_that_is_killed_is_named_by_its_rank(cluster: Cluster, tmp_path: Path) -> None:
    with training(tmp_path) as process:
        agent = parent(ranks(tmp_path / "run")[2])
        os.kill(parent(parent(agent)), signal.SIGKILL)
        status, said = ended(process)
        assert status == 1 and "rank 2 on " in said, said


@pytest.mark.parametrize("options", [[], ["elastic={max_np: 4}"]])
def test_ctrl_c_ends_all(cluster: Cluster, tmp_path: Path, options: list[str]) -> None:
    with training(tmp_path, *options) as process:
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 130


def test_sigterm_ends_an_elastic_run_behind_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    with training(tmp_path, "elastic={max_np: 4}", "checkpoint={}") as process:
        process.send_signal(signal.SIGTERM)
        status, said = ended(process)
        assert status == 0 and "stopped by SIGTERM after" in said, said
    assert (tmp_path / "run" / "checkpoints" / "last" / "model.safetensors").exists()


def test_a_launcher_that_is_killed_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    with training(tmp_path) as process:
        assert ranks(tmp_path / "run").keys() == {0, 1, 2, 3}  # what `training` then sees end
        process.kill()
        process.communicate()


def test_what_does_not_fit_into_the_cluster_is_refused(cluster: Cluster, hvdkit: Hvdkit) -> None:
    train = ["train", *RECIPE, "--framework", "mxnet", "--launcher", "ray", "--dry-run"]
    done = hvdkit(*train, "-np", "5")
    assert done.returncode == 2 and done.stderr.startswith("-np 5: the Ray cluster has 4 free slots; "), done.stderr
    done = hvdkit(*train, "-np", "2", "-H", "10.1.2.3:2")
    assert done.returncode == 2 and done.stderr.startswith("-H: 10.1.2.3:2: the Ray cluster offers "), done.stderr


def test_a_node_that_is_lost_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Behind the other tests with two nodes."""
    with training(tmp_path) as process:
        cluster.order("kill")
        status, said = ended(process)
        named = r"rank [0-3] on \S+ (was ended after \S+ s by a signal that hvdkit has not sent|vanished)"
        assert status == 1 and re.search(named, said), said


@pytest.mark.timeout(600)
def test_an_elastic_run_follows_the_nodes_of_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """A rank hangs and its slot rests for a while; a node is lost, and one is added. Each time training goes on."""
    cluster.order("add")
    run, gate = tmp_path / "run", tmp_path / "gate"
    gate.write_text("slow 0.2")  # with two ranks, an epoch takes 18 s at least
    options = [*paced.overrides(gate), "batch_size=8", "epochs=8", "--stall-timeout", f"{hygiene.patience(10):.0f}"]
    bounds = "elastic={min_np: 1, max_np: 4, commit_every: 1}"

    def steps(np: int) -> int:
        # Each rank takes 8 images of 1437.
        return 8 * (1437 // (8 * np))

    def trains_with(np: int) -> bool:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["total_steps"] == steps(np) if lines else False

    with training(tmp_path, *options, bounds) as process:
        os.kill(min(processes(run, "worker-").values()), signal.SIGSTOP)
        for event, np in (("", 3), ("", 4), ("kill", 2), ("add", 4)):
            if event:
                cluster.order(event)
            wait_for(lambda np=np: process.poll() is not None or trains_with(np))
        gate.unlink()
        status, said = ended(process)
        assert status == 0, said
    assert re.search(r"^worker-\S+ hangs: no progress for .* is ended$", said, re.MULTILINE), said
    result = json.loads((run / "result.json").read_text())
    found = [(each["why"], each["np_before"], each["np"]) for each in result["recoveries"]]
    assert found[:3] == [("lost", 4, 3), ("hosts", 3, 4), ("lost", 4, 2)], said
    assert found[3:] in ([("hosts", 2, 4)], [("hosts", 2, 3), ("hosts", 3, 4)]), "on a slow machine one after the other"
    assert (result["np"], result["steps"]) == (4, steps(4))


def test_an_elastic_run_takes_no_list_of_hosts(inside: Hvdkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_cluster", lambda np: {"slots": {"10.0.0.1": 4}})
    options = ["--framework", "mxnet", "--launcher", "ray", "-np", "2", "-H", "10.0.0.1:2", "elastic={max_np: 4}"]
    done = inside("train", *RECIPE, *options, "--out", "run")
    told = "-H: leave it out: an elastic run by --launcher ray follows the cluster's own list of hosts\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "RAY_ADDRESS 127.0.0.1:1: no Ray cluster answers there ("),
        ("ray://head:10001", "RAY_ADDRESS ray://head:10001: expected such as 10.0.0.1:6379; start hvdkit on a node"),
    ],
)
def test_a_cluster_that_is_not_there(inside: Hvdkit, monkeypatch: pytest.MonkeyPatch, address: str, said: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    done = inside("train", *RECIPE, "--framework", "mxnet", "--launcher", "ray", "--out", "run")
    assert (done.returncode, done.stderr.startswith(said), done.stderr.count("\n")) == (2, True, 1), done.stderr


def test_a_ray_that_is_not_installed(inside: Hvdkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    done = inside("train", *RECIPE, "--framework", "mxnet", "--launcher", "ray", "--out", "run")
    assert done.returncode == 2
    assert done.stderr == f"--launcher ray: Ray is not installed; run `{sys.executable} -m pip install 'hvdkit[ray]'`\n"
