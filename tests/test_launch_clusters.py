"""`hvdkit launch` on two hosts, by each launcher that reaches other machines: ends are told with their hosts. The
other commands that start ranks, on the same hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import hygiene
from tests.cluster import starving
from tests.cluster.slurm_daemons import Slurm
from tests.cluster.sshd_daemons import Sshd
from tests.conftest import ROOT
from tests.test_slurm import ALLOCATION, HVDKIT, processes, wait_for

pytestmark = pytest.mark.timeout(300)

Start = Callable[[Path, list[str]], "subprocess.Popen[str]"]
RECIPE = ["resnet20-digits", "model.name=resnet8", "threads=1", "--framework", "mxnet"]
SIZES = ["--min-bytes", "1024", "--max-bytes", "65536", "--seconds", "0.2"]
# Commands that write NAME.json, which has the hosts of its ranks; evaluate takes the checkpoint of the train before it.
OTHERS = {
    "bench": ["bench", "allreduce", "--framework", "mxnet", *SIZES],
    "parity": ["parity", *RECIPE, "--steps", "3"],
    "profile": ["profile", *RECIPE, "--steps", "8"],
    "evaluate": ["evaluate", "result", "--framework", "mxnet"],
}
LAUNCH = ["launch", "--stall-timeout", "30", str(ROOT / "tests" / "launched" / "program.py")]
# How rank 3, the second one of the other host, ends; the command's exit status, and what is told of the rank.
KINDS = {
    "none": (0, ""),
    "raises": (1, " failed: ValueError: the seventh image is upside down (ended with exit code 1 "),
    "killed": (128 + signal.SIGKILL, " was killed by SIGKILL"),
    "sleeps": (1, " hangs without output or work for "),
}


@pytest.fixture(scope="module", params=["horovodrun", "mpirun", "slurm"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Start, str]]:
    """Starts a command on four ranks of two hosts, with the folder of its run and its words; and the other host."""
    launcher, kind = request.param, Slurm if request.param == "slurm" else Sshd
    missing = kind.missing() + (["mpirun"] if launcher == "mpirun" and shutil.which("mpirun") is None else [])
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {missing[:1] or 'nothing else'}: sudo make cluster-check")
    with (
        starving.network(2, 1000.0, control=False) as network,
        kind(network, tmp_path_factory.mktemp(launcher)) as cluster,
    ):
        where = [] if isinstance(cluster, Slurm) else ["--launcher", launcher, "-H", cluster.option(2)]
        before = ALLOCATION if isinstance(cluster, Slurm) else []

        def start(run: Path, words: list[str]) -> subprocess.Popen[str]:
            return cluster.start(
                [*before, *HVDKIT, words[0], "-np", "4", *where, "--out", str(run), *words[1:]],
                cwd=run.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={"PYTHONPATH": str(ROOT), "FAULTY": "3", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

        yield start, "h2" if isinstance(cluster, Slurm) else "10.77.0.2"


@pytest.mark.parametrize("fault", KINDS)
def test_a_program_ends_on_the_other_host(fault: str, started: tuple[Start, str], tmp_path: Path) -> None:
    """Which rank it is to be, a variable says that hvdkit does not know."""
    start, host = started
    said, told = start(tmp_path / "run", [*LAUNCH, fault]).communicate(timeout=hygiene.patience(180))
    status, how = KINDS[fault]
    launched = json.loads((tmp_path / "run" / "launch.json").read_text())
    if status == 0:
        assert launched["failure"] is None and f"[3] rank 3 of 4 {fault}" in said, told
    else:
        assert f"rank 3 on {host}{how}" in told and f"rank 3 on {host}" in launched["failure"], told
        assert "\n    step 4" in told, "its own last lines"
    if fault == "sleeps":
        assert "allreduce 'gradients' waits: ranks 0, 1, 2 entered it, rank 3 on" in told, told
    assert [rank["host"] for rank in launched["ranks"]][2:] == [host, host]
    assert not list(processes(tmp_path / "run"))


def test_ctrl_c_leaves_nothing_on_any_host(started: tuple[Start, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started[0](run, [*LAUNCH, "waits"])
    log = run / "logs" / "rank-3.log"
    wait_for(lambda: process.poll() is not None or (log.exists() and "step 0" in log.read_text()))
    own = [number for number, words, _ in processes(run) if words.split(b"\0")[1:4] == [b"-m", b"hvdkit", b"launch"]]
    os.kill(*own, signal.SIGINT)
    _, told = process.communicate(timeout=hygiene.patience(60))
    assert (process.returncode, "interrupted" in told) == (130, True), told
    wait_for(lambda: not list(processes(run)))


def test_other_commands_are_over_both_hosts(started: tuple[Start, str], tmp_path: Path) -> None:
    start, host = started
    for name, words in {"result": ["train", *RECIPE, "steps=4"], **OTHERS}.items():
        _, told = (process := start(tmp_path / name, words)).communicate(timeout=hygiene.patience(200))
        assert process.returncode == 0, told
        result = json.loads((tmp_path / name / f"{name}.json").read_text())
        hosts = [rank["host"] for rank in result["ranks"]] if name == "profile" else result["hosts"]
        assert len(hosts) == 4 and hosts[2:] == [host, host], name
