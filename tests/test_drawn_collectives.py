"""Horovod's collectives drawn at random, in shared memory and between hosts (tests/drawn_collectives.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests import hygiene
from tests.cluster import starving
from tests.conftest import ROOT
from tests.launching import framework_job

pytestmark = pytest.mark.long

SCRIPT, DYNAMIC = ROOT / "tests" / "drawn_collectives.py", "HOROVOD_DYNAMIC_PROCESS_SETS"


def drawn(folder: Path, framework: str, np: int, rounds: int, most: int = 1_000_000, seed: int = 1) -> list[str]:
    """The digests of what the ranks got, each of which has compared it."""
    words = (framework, seed, rounds, most)
    job = framework_job(framework, folder, SCRIPT, *words, np=np, **{DYNAMIC: "1"})
    direct.run(job)
    lines = [job.log(rank).read_text().splitlines()[-1] for rank in range(np)]
    assert all(line.startswith("digest ") for line in lines), lines
    return lines


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
def test_whatever_is_drawn_is_right(tmp_path: Path) -> None:
    drawn(tmp_path, "pytorch", 3, rounds=25)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow", "mxnet"])
@pytest.mark.parametrize(("np", "most"), [(2, 100_000_000), (5, 3_000_000), (8, 300_000)])
def test_the_same_bits_in_each_run(tmp_path: Path, framework: str, np: int, most: int) -> None:
    first, again = (drawn(tmp_path / name, framework, np, 20, most, seed=np) for name in ("first", "again"))
    assert first == again


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["pytorch", "mxnet"])
def test_on_two_hosts(tmp_path: Path, framework: str) -> None:
    with starving.network(2, 1000.0) as network:
        command = [sys.executable, "-m", "hvdkit", "launch", "-np", "4", "-H", network.hosts_option(2)]
        command += ["--framework", framework, "-x", f"{DYNAMIC}=1", "--out", str(tmp_path / "out"), "--"]
        words = [str(SCRIPT), framework, "2", "25", "1000000"]
        network.run([*command, *words], check=True, cwd=ROOT, timeout=hygiene.patience(200))
