"""Horovod's own edges, which the build mends (hvdkit/runtimes/patches)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hvdkit.runtimes.store import find
from tests import hygiene
from tests.cluster import starving
from tests.conftest import ROOT, run

pytestmark = pytest.mark.long


# Runs a script on four ranks of two hosts. As on a fresh Debian, each host's name resolves to a loopback address; only
# the interface named to Horovod leads to the other host.
LAUNCH = """
import sys
from pathlib import Path
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
memory, python, folder, *arguments = sys.argv[1:]
# While a rank waits for the others, Horovod asks all of them each cycle: on a loaded machine cycles of 1 ms would be a
# part of the bytes that are measured.
environment = {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "20", "HOROVOD_SHARED_MEMORY": memory}
LAUNCHERS["slurm"].run(Job(Path(python), arguments, 4, [Host("h1", 2), Host("h2", 2)], environment, Path(folder)))
"""
NAMED = """
import ctypes, os, runpy, socket, subprocess, sys
assert ctypes.CDLL(None).unshare(0x20000 | 0x4000000) == 0  # file systems, names
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/hosts"], check=True)
socket.sethostname(os.environ["HOROVOD_HOSTNAME"])
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def on_two_hosts(script: str, folder: Path, shared_memory: bool = True) -> list[str]:
    """What four ranks print that run a script of tests/hosts."""
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n127.0.1.1 h1\n127.0.1.1 h2\n")
    ranks = [
        str(int(shared_memory)),
        str(find("mxnet").python),
        str(folder / "logs"),
        "-c",
        NAMED,
        str(names),
        str(ROOT / "tests/hosts" / script),
    ]
    with starving.network(2, 1000.0) as network:
        network.run([sys.executable, "-c", LAUNCH, *ranks], check=True, cwd=ROOT, timeout=hygiene.patience(120))
    return [line for log in sorted((folder / "logs").glob("rank-*.log")) for line in log.read_text().splitlines()]


@pytest.mark.timeout(150)
def test_process_sets_reach_the_other_host(tmp_path: Path) -> None:
    """Two hosts whose names resolve to loopback, as Debian's hosts file has it.

    Horovod 0.28.1 opens a process set's connections on whatever interface the host's name leads to: without the edit
    every rank dies with `connect [127.0.1.1]: Connection refused`. Of a set with ranks of unlike places on their hosts,
    it has ranks 1 and 3 wait for each other under two names.
    """
    told = on_two_hosts("process_sets.py", tmp_path)
    assert [line for line in told if "sums" in line] == [f"rank {rank}: sums are right" for rank in range(4)]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("shared_memory", "ring"), [pytest.param(False, 1.5, marks=pytest.mark.thorough), (True, 1.0)])
def test_a_hierarchy_sends_one_vector_a_host_between_the_hosts(
    tmp_path: Path, shared_memory: bool, ring: float
) -> None:
    """A ring of four ranks sends 2 · 3/4 vectors from host to host, one of two roots 2 · 1/2, as lanes do."""
    told = [json.loads(line) for line in on_two_hosts("ways.py", tmp_path, shared_memory) if line.startswith("[")]
    crossed = {way: sent / payload for way, payload, sent, _ in told}
    assert ring < crossed["ring"] < ring + 0.1 and 1.0 < crossed["hierarchical"] < 1.1, crossed
    assert 0.9 < crossed["central"] < 2.3, crossed


@pytest.mark.timeout(150)
def test_a_broadcast_that_is_over_at_once_is_left_alone(tmp_path: Path) -> None:
    """Horovod 0.28.1 reads a broadcast's name when MXNet may have freed it: without the edit, a segmentation fault."""
    library = tmp_path / "slow_unlock.so"
    compiled = run(["cc", "-shared", "-fPIC", "-o", str(library), str(ROOT / "tests" / "slow_unlock.c"), "-ldl"], 30)
    assert compiled.returncode == 0, compiled.stderr
    rank = [str(find("mxnet").python), str(ROOT / "tests" / "broadcast_rank.py")]
    done = run(rank, timeout=100, env={**os.environ, "LD_PRELOAD": str(library), "HOROVOD_IDLE_CYCLE_TIME": "100"})
    assert (done.returncode, done.stdout) == (0, "all over\n"), done.stderr
