"""`--launcher mpirun` on two hosts: over ssh, by Open MPI and by MPICH, and inside a Slurm allocation."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdkit.errors import RunError
from hvdkit.launch import supervise
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.cluster import starving
from tests.cluster.slurm_daemons import Slurm
from tests.cluster.sshd_daemons import Sshd
from tests.conftest import ROOT
from tests.test_slurm import HVDKIT, RECIPE, rank_of, steps, wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

LAUNCHED = [*HVDKIT, "train", *RECIPE, "--launcher", "mpirun", "-np", "4"]
# Debian's names for the launchers of each MPI: where both are installed, `mpirun` is one of them.
MPIS = {"Open MPI": "mpirun.openmpi", "MPICH": "mpirun.mpich"}


def needs(missing: list[str], what: str) -> None:
    if missing:
        pytest.skip(f"needs {what} ({missing[0]}): sudo make cluster-check")
    if os.geteuid() != 0:
        pytest.skip("needs root, as the daemons do")


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    with starving.network(2, 1000.0, control=False) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    needs(Sshd.missing(), "sshd")
    with Sshd(request.getfixturevalue("network"), tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment in which `mpirun` is this MPI's."""
    program = shutil.which(MPIS[request.param])
    needs([] if program else [MPIS[request.param]], request.param)
    (tmp_path / "mpi").mkdir()
    script = tmp_path / "mpi" / "mpirun"  # no link: MPICH looks for its other programs beside its own name
    script.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{tmp_path / 'mpi'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def hosts_of(run: Path) -> list[tuple[str, int]]:
    return [(end["host"], end["exit_code"]) for end in json.loads((run / "logs" / "exits.json").read_text())]


def test_four_ranks_train_on_two_hosts_over_ssh(hosts: Sshd, mpi: dict[str, str], tmp_path: Path) -> None:
    train = [*LAUNCHED, "--framework", "mxnet", "-H", hosts.option(2), "--out", str(tmp_path / "run"), "epochs=1"]
    done = hosts.run(train, env=mpi, stderr=subprocess.PIPE, text=True, timeout=hygiene.patience(120))
    assert done.returncode == 0, done.stderr
    assert hosts_of(tmp_path / "run") == [("10.77.0.1", 0)] * 2 + [("10.77.0.2", 0)] * 2


@pytest.mark.parametrize("mpi", ["Open MPI"], indirect=True)
def test_a_comparison_over_ssh_is_on_one_host_and_on_both(hosts: Sshd, mpi: dict[str, str], tmp_path: Path) -> None:
    words = ["compare", *RECIPE, "steps=6", "warmup_steps=1", "--framework", "mxnet", "--no-parity"]
    places = ["-H", hosts.option(2), "--launcher", "mpirun", "--out", str(tmp_path / "out")]
    done = hosts.run(
        [*HVDKIT, *words, *places], env=mpi, stderr=subprocess.PIPE, text=True, timeout=hygiene.patience(200)
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [len(set(run["hosts"])) for run in told["runs"]] == [1, 2]
    assert [(row["np"], row["against"]) for row in told["ratios"]] == [(4, "np=2")]


def test_a_rank_on_the_other_host_that_is_killed_is_named(hosts: Sshd, mpi: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = [*LAUNCHED, "epochs=1000", "--framework", "mxnet", "-H", hosts.option(2), "--out", str(run)]
    started = hosts.start(train, env=mpi, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: steps(run) > 2 or started.poll() is not None)
    assert started.poll() is None, started.communicate()[1]
    os.kill(rank_of(run, 3), signal.SIGKILL)
    _, said = started.communicate(timeout=hygiene.patience(60))
    assert (started.returncode, "rank 3 on 10.77.0.2 was killed by SIGKILL" in said) == (1, True), said
    with pytest.raises(AssertionError, match="rank 0 does not run"):
        rank_of(run, 0)


@pytest.mark.parametrize("mpi", ["Open MPI"], indirect=True)
def test_a_host_without_ssh_is_one_line(hosts: Sshd, mpi: dict[str, str], tmp_path: Path) -> None:
    train = [*LAUNCHED, "--framework", "mxnet", "-H", "10.77.0.1:2,10.77.0.9:2", "--out", str(tmp_path / "run")]
    done = hosts.run(train, env=mpi, stderr=subprocess.PIPE, text=True, timeout=hygiene.patience(120))
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"^mpirun ended with exit code \d+; nothing is known of the end of rank", done.stderr, re.MULTILINE
    )


def test_an_mpirun_that_starts_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "mpirun"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo waiting for h2; exec sleep 600; }\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    job = Job(find("mxnet").python, ["-c", "pass"], 2, parse_hosts(None, 2), {}, tmp_path / "logs", stall_timeout_s=1.0)
    with pytest.raises(RunError) as caught:
        LAUNCHERS["mpirun"].run(job)
    assert str(caught.value).startswith("mpirun has started no rank within 1 s (--stall-timeout); ")
    assert str(caught.value).endswith("ends:\n    waiting for h2")


def test_an_mpirun_that_outlives_its_ranks_is_ended_and_training_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "bin" / "mpirun"
    script.parent.mkdir()
    script.write_text("""#!/bin/sh
[ "$1" != --version ] || exit 0
while [ "$1" != -I ]; do python=$1; shift; done
OMPI_COMM_WORLD_RANK=0 "$python" "$@" & OMPI_COMM_WORLD_RANK=1 "$python" "$@"
exec sleep 600
""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(supervise, "LINGERS_S", 0.5)
    logs = tmp_path / "logs"
    LAUNCHERS["mpirun"].run(Job(find("mxnet").python, ["-c", "pass"], 2, parse_hosts(None, 2), {}, logs))
    assert [end["exit_code"] for end in json.loads((logs / "exits.json").read_text())] == [0, 0]
    assert capsys.readouterr().err.startswith("what started the ranks has not ended within 0")


def test_the_doctor_reaches_both_hosts(hosts: Sshd, tmp_path: Path) -> None:
    command = [*HVDKIT, "doctor", "-H", f"{hosts.option(2)},10.77.0.9:1", "--out", str(tmp_path / "found")]
    done = hosts.run(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    found = json.loads((tmp_path / "found" / "doctor.json").read_text())
    assert [host["way"] for host in found["hosts"]] == ["here", "ssh", "ssh"], done.stdout
    assert [host["address"] for host in found["hosts"]] == ["10.77.0.1", "10.77.0.2", None], done.stdout
    assert [(each["host"], "No route to host" in each["what"]) for each in found["faults"] if each["fault"]] == [
        ("10.77.0.9", True)
    ]


def test_inside_a_slurm_allocation(request: pytest.FixtureRequest, mpi: dict[str, str], tmp_path: Path) -> None:
    needs(Slurm.missing(), "Slurm")
    with Slurm(request.getfixturevalue("network"), tmp_path / "slurm") as slurm:
        train = [*LAUNCHED, "--framework", "mxnet", "--out", str(tmp_path / "run"), "epochs=1"]
        done = slurm.run(
            ["salloc", "--quiet", "-N2", "-n4", "env", *(f"{name}={value}" for name, value in mpi.items()), *train],
            stderr=subprocess.PIPE, text=True, timeout=hygiene.patience(120),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert hosts_of(tmp_path / "run") == [("h1", 0)] * 2 + [("h2", 0)] * 2
