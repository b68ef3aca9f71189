"""What `hvdkit submit --to kubernetes` writes, run as the MPI Operator runs it, in its pods but without Kubernetes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import hygiene
from tests.cluster import starving
from tests.cluster.pods import Cluster, end, missing
from tests.inside import call

pytestmark = pytest.mark.timeout(300)

STEPS = 11  # of an epoch on four ranks
RECIPE = ["resnet20-digits", "model.name=resnet8", "threads=1", "log_every=1", "checkpoint.every_steps=5"]
SUBMIT = ["--to", "kubernetes", "--image", "hvdkit", "--results", "runs", "--name", "digits", "--script", "job.yaml"]


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    if lacking := missing():
        pytest.skip(f"needs Open MPI and sshd ({lacking[0]}): sudo make cluster-check")
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount what pods have")
    with starving.network(3, 1000.0, control=False) as made:
        yield made


def submitted(folder: Path, *asked: str) -> str:
    done = call(folder, "submit", *RECIPE, *SUBMIT, *asked)
    assert done.returncode == 0, done.stderr
    return (folder / "job.yaml").read_text()


@contextmanager
def running(cluster: Cluster, workers: int) -> Iterator[tuple[subprocess.Popen[str], list[subprocess.Popen[Any]]]]:
    """The job's launcher, with its output, and its workers, which are ready."""
    with ExitStack() as stack:

        def started(pod: str, **options: Any) -> subprocess.Popen[Any]:
            process = stack.enter_context(cluster.start(pod, **options))
            stack.callback(process.kill)
            return process

        servers = [started(f"digits-worker-{number}", stderr=subprocess.PIPE) for number in range(workers)]
        for server in servers:  # as WaitForWorkersReady has it
            assert server.stderr is not None and b"Server listening" in server.stderr.readline()
        yield started("digits-launcher", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), servers


def said(launcher: subprocess.Popen[str]) -> str:
    out, _ = launcher.communicate(timeout=hygiene.patience(120))
    return out


def wait_for(what: Callable[[], object], launcher: subprocess.Popen[str]) -> None:
    until = time.monotonic() + hygiene.patience(90)
    while not what():
        assert launcher.poll() is None and time.monotonic() < until, launcher.stdout and launcher.stdout.read()
        time.sleep(0.1)


def test_a_job_is_deleted_and_goes_on(network: Any, tmp_path: Path) -> None:
    """Ranks run in the workers alone, which mount the claim too."""
    claim = tmp_path / "claim"
    claim.mkdir()
    run = claim / "digits"

    def job(epochs: int) -> Cluster:
        asked = ["--framework", "mxnet", "-np", "4", "--nodes", "2", "--no-launcher-as-worker", "--overwrite"]
        files = tmp_path / f"files-{epochs}"
        files.mkdir()
        return Cluster(network, submitted(tmp_path, f"epochs={epochs}", *asked), files, {"runs": claim})

    with running(job(1000), 2) as (launcher, workers):
        wait_for((run / "metrics.jsonl").exists, launcher)
        wait_for(lambda: (run / "metrics.jsonl").read_text().count("\n") > 5, launcher)
        for pod in (*workers, launcher):  # as `kubectl delete` does
            end(pod)
        out = said(launcher)
        assert (launcher.returncode, "stopped by SIGTERM after /home/hvdkit/runs/digits/checkpoints/step-" in out) == (
            0, True
        ), out  # fmt: skip
        assert [worker.wait(hygiene.patience(30)) for worker in workers] == [0, 0], "they wait for their ranks' end"
    assert not (run / "result.json").exists()
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(kept) >= 2 and "last" in kept, kept
    reached = int(kept[-1].removeprefix("step-"))
    with running(job(reached // STEPS + 2), 2) as (launcher, _):
        out = said(launcher)
        assert launcher.returncode == 0 and "continues from step" in out, out
    result = json.loads((run / "result.json").read_text())
    assert (result["launcher"], result["np"], result["first_step"]) == ("mpirun", 4, reached)
    ends = json.loads((run / "logs" / "exits.json").read_text())
    pods = [f"digits-worker-{number}.digits.default.svc" for number in (0, 0, 1, 1)]
    assert [(end["host"], end["exit_code"]) for end in ends] == [(pod, 0) for pod in pods]
    assert {f"rank-{rank}.log" for rank in range(4)} <= {path.name for path in (run / "logs").iterdir()}


def test_the_launcher_runs_ranks_too(network: Any, tmp_path: Path) -> None:
    manifest = submitted(tmp_path, "steps=3", "--framework", "pytorch", "-np", "2", "--nodes", "2")
    claim, files = tmp_path / "claim", tmp_path / "files"
    claim.mkdir()
    files.mkdir()
    with running(Cluster(network, manifest, files, {"runs": claim}), 1) as (launcher, _):
        out = said(launcher)
        assert launcher.returncode == 0, out
    ends = json.loads((claim / "digits" / "logs" / "exits.json").read_text())
    assert [end["host"].partition(".")[0] for end in ends] == ["digits-launcher", "digits-worker-0"]


def test_an_elastic_job_asks_which_pods_there_are(network: Any, tmp_path: Path) -> None:
    elastic = ["elastic={min_np: 2, max_np: 2}", "epochs=1", "--framework", "mxnet", "-np", "2", "--nodes", "2"]
    manifest = submitted(tmp_path, *elastic)
    claim, files = tmp_path / "claim", tmp_path / "files"
    claim.mkdir()
    files.mkdir()
    with running(Cluster(network, manifest, files, {"runs": claim}), 2) as (launcher, _):
        out = said(launcher)
        assert launcher.returncode == 0, out
    result = json.loads((claim / "digits" / "result.json").read_text())
    assert (result["launcher"], result["np"]) == ("horovodrun", 2)
