"""Real training runs that go wrong: who is named, how soon, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.runtimes import store
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import ROOT, Hvdkit
from tests.launching import MARK, gone_within, marked, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


SMALL = ["model.name=resnet8", "batch_size=8", "log_every=1", "threads=1"]


def failed(framework: str, fault: str, folder: Path, recipe: Path, mark: str, launcher: str = "direct") -> RankFailure:
    runtime = find(framework)
    job = Job(
        python=runtime.python,
        arguments=[str(ROOT / "tests" / "faults" / "rank.py"), framework, fault, str(recipe), *SMALL],
        np=2,
        hosts=[Host("localhost", 2)],
        environment=runtime.environment | {MARK: mark, "OMP_NUM_THREADS": "1"},
        log_dir=folder / "logs",
        stall_timeout_s=12,
    )
    with pytest.raises(RankFailure) as caught:
        LAUNCHERS[launcher].run(job)
    assert "Traceback" not in str(caught.value).partition("its log")[0]
    assert not marked(mark), "all ranks must be gone by now"
    assert not list(folder.rglob("*.failure.json.*")), "nothing half-written"
    return caught.value


FRAMEWORKS = ("pytorch", "mxnet")  # one whose calls return at once when they are done, one that works behind them


ENDS = {
    "killed": ("rank 1 on localhost was killed by SIGKILL", "hvdkit has not sent it"),
    "exits": ("rank 1 on localhost ended with exit code 7",),
    "leaves": ("rank 1 on localhost failed at step 3: SystemExit: 3; it left", "(ended with exit code 3 "),
    "crashes": ("rank 1 on localhost was killed by SIGSEGV", "Segmentation fault", "rank.py", " in commit"),
    "raises": ("rank 1 on localhost failed at step 3: ValueError: the seventh image is upside down",),
    "memory": ("rank 1 on localhost failed at step 3: MemoryError",),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("framework", "fault"),
    [
        *(("mxnet", fault) for fault in ENDS),
        # Who named the rank has heard of no framework; how the others lose it is the framework's.
        *(
            pytest.param("pytorch", fault, marks=[] if fault in ("killed", "raises") else pytest.mark.thorough)
            for fault in ENDS
        ),
    ],
)
def test_a_rank_that_ends_is_named(framework: str, fault: str, tmp_path: Path, recipe: Path, mark: str) -> None:
    error = failed(framework, fault, tmp_path, recipe, mark)
    assert error.rank == 1 and error.exit_status == 1
    assert all(part in str(error) for part in ENDS[fault]), str(error)
    exits = json.loads((tmp_path / "logs" / "exits.json").read_text())
    assert [row["rank"] for row in exits] == [0, 1]


# What has to wait for the watchdog waits side by side.


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Callable[[str, str], RankFailure]:
    """What the launcher says of a fault that only the watchdog ends, under either framework; two runs at a time."""

    def one(framework: str, fault: str) -> RankFailure:
        return failed(framework, fault, tmp_path_factory.mktemp(f"{framework}-{fault}"), recipe, uuid.uuid4().hex)

    @cache
    def both(fault: str) -> dict[str, RankFailure]:
        with ThreadPoolExecutor(len(FRAMEWORKS)) as pool:
            return dict(zip(FRAMEWORKS, pool.map(lambda framework: one(framework, fault), FRAMEWORKS), strict=True))

    return lambda framework, fault: both(fault)[framework]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rank_that_hangs_is_named_with_its_step_and_what_it_does(framework: str, hung: Any) -> None:
    error = hung(framework, "sleeps")  # it would sleep for ten minutes
    assert error.rank == 1
    assert "rank 1 on localhost hangs at step 3: no progress for" in str(error), str(error)
    assert "executing commit (" in str(error) and "rank.py:" in str(error)
    assert re.match(r"allreduce 'gradients\S*' .*: rank 0 entered (it|them), rank 1 on localhost did not; ", str(error))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rank_that_is_frozen_is_named(framework: str, hung: Any) -> None:
    error = hung(framework, "frozen")
    assert error.rank == 1
    assert "rank 1 on localhost" in str(error) and "SIGSTOP" in str(error), str(error)


def test_horovodrun_names_the_rank_that_hangs_too(tmp_path: Path, recipe: Path, mark: str) -> None:
    """Those that end: tests/test_launch_horovod.py."""
    error = failed("mxnet", "sleeps", tmp_path, recipe, mark, launcher="horovodrun")
    assert error.rank == 1, str(error)


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_a_rank_that_evaluates_while_the_others_train(launcher: str, tmp_path: Path, recipe: Path, mark: str) -> None:
    """It makes progress, so what it does is known from when it is ended."""
    if shutil.which(launcher) is None and launcher == "mpirun":
        pytest.skip("needs Open MPI: sudo make cluster-check")
    error = failed("mxnet", "evaluates", tmp_path, recipe, mark, launcher=launcher)
    assert error.rank == 1
    assert "rank 0 entered it, rank 1 on localhost did not; " in str(error), str(error)
    assert "rank 1 on localhost proceeds at step 3, in phase 'evaluation', executing commit (" in str(error), str(error)
    assert "rank 0 on localhost" in (tmp_path / "logs" / "stacks.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_ended_leaves_no_orphan(
    number: signal.Signals, tmp_path: Path, recipe: Path, mark: str
) -> None:
    """With nothing to keep, at once; with checkpoints SIGTERM asks for one: tests/test_checkpoint_runs.py."""
    command = [sys.executable, "-m", "hvdkit", "train", recipe, "--framework", "mxnet", "-np", "2", "--out", "run"]
    command += [*SMALL, "epochs=1000"]
    process = subprocess.Popen(
        [*map(str, command), "checkpoint=null"],
        cwd=tmp_path,
        env=os.environ | {MARK: mark},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60), "training never began"
    process.send_signal(number)
    _, told = process.communicate(timeout=hygiene.patience(60))
    assert gone_within(mark, 30)
    assert "Traceback" not in told
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert not (tmp_path / "run" / "result.json").exists()
    # the folder is free for the next run, whatever has happened to this one
    assert not list(tmp_path.rglob(".*.json*"))


@pytest.mark.usefixtures("warm")
def test_a_taken_port_in_the_environment_does_no_harm(hvdkit: Hvdkit, recipe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(taken.getsockname()[1])}
        done = hvdkit(
            "train", recipe, "--framework", "mxnet", "-np", 2, "--out", "run", *SMALL, "steps=1", **environment
        )
    assert done.returncode == 0, done.stderr


# Full and read-only disks, in a mount namespace of our own, which root can make and, where the kernel allows, anyone.


def on_a_small_disk(tmp_path: Path, kib: int, options: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    mounted = f"size={kib}k{options}"
    namespace = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    inside = ["sh", "-c", script, "sh", mounted, str(disk), sys.executable, "-m", "hvdkit", *arguments]
    return subprocess.run(
        [*namespace, *inside],
        capture_output=True,
        text=True,
        timeout=hygiene.patience(120),
        cwd=tmp_path,
    )


def test_a_full_disk_while_logging(tmp_path: Path, recipe: Path) -> None:
    arguments = ["train", str(recipe), "--framework", "mxnet", "-np", "2", "--out", "disk/run", *SMALL]
    done = on_a_small_disk(tmp_path, 36, "", [*arguments, "checkpoint=null"])
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr and "metrics.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_disk_without_room_for_the_weights(tmp_path: Path, recipe: Path) -> None:
    arguments = ["train", str(recipe), "--framework", "mxnet", "-np", "2", "--out", "disk/run", *SMALL, "steps=9"]
    done = on_a_small_disk(tmp_path, 300, "", [*arguments, "checkpoint.every_steps=3"])
    assert done.returncode == 1, done.stderr
    told = "cannot be written (No space left on device); there is none; free space, then start again"
    assert told in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_before_the_start(tmp_path: Path, recipe: Path) -> None:
    arguments = ["train", str(recipe), "--framework", "mxnet", "-np", "1", "--out", "disk/run"]
    done = on_a_small_disk(tmp_path, 8, ",nr_inodes=3", arguments)
    assert done.returncode in (1, 2), done.stderr
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr


# Runtimes that change under our hands


@pytest.fixture
def runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runtimes with an `mxnet` that runs the real one's interpreter and can be broken."""
    real = find("mxnet")
    folder = tmp_path / "runtimes"
    (folder / "mxnet").mkdir(parents=True)
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(folder))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {real.python} "$@"\n')
    python.chmod(0o755)
    store.save(real.model_copy(update={"python": python, "added": True}))
    return folder


def test_a_runtime_that_is_deleted_is_missing(runtimes: Path, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    assert hvdkit("train", recipe, "--framework", "mxnet", "--out", "a", *SMALL, "steps=1").returncode == 0
    (tmp_path / "python").unlink()
    done = hvdkit("train", recipe, "--framework", "mxnet", "--out", "b")
    assert done.returncode == 2 and "hvdkit runtime build mxnet" in done.stderr, done.stderr
    shutil.rmtree(runtimes)
    done = hvdkit("train", recipe, "--framework", "mxnet", "--out", "b")
    assert done.returncode == 2 and "hvdkit runtime build mxnet" in done.stderr, done.stderr
    assert not (tmp_path / "b").exists()


def test_a_runtime_that_is_broken_is_told_with_its_remedy(
    runtimes: Path, hvdkit: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    (broken / "mxnet").mkdir(parents=True)
    (broken / "mxnet" / "__init__.py").write_text("raise ImportError('libmxnet.so: cannot open shared object file')\n")
    done = hvdkit("train", recipe, "--framework", "mxnet", "--out", "b", PYTHONPATH=str(broken))
    assert done.returncode == 1
    assert "libmxnet.so: cannot open shared object file" in done.stderr and "hvdkit doctor" in done.stderr, done.stderr
