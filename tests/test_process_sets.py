"""Horovod's own edges, which the build mends (hvdkit/runtimes/patches)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

from hvdkit.runtimes.store import find

pytestmark = pytest.mark.long


def on_two_hosts(script: str) -> list[str]:
    """What four ranks print that run a script of tests/hosts."""
    namespaces = ["unshare", "-nm"] if os.geteuid() == 0 else ["unshare", "-Urnm"]
    folder = ROOT / "tests" / "hosts"
    ranks = [str(folder / "two_hosts.py"), str(find("mxnet").python), str(folder / script)]
    done = run([*namespaces, sys.executable, *ranks], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(150)
def test_process_sets_reach_the_other_host() -> None:
    """Two hosts whose names resolve to loopback, as Debian's hosts file has it.

    Horovod 0.28.1 opens a process set's connections on whatever interface the host's name leads to: without the edit
    every rank dies with `connect [127.0.1.1]: Connection refused`.
    """
    told = on_two_hosts("process_sets.py")
    assert sorted(line for line in told if "sums are right" in line) == [
        f"rank {rank}: sums are right" for rank in range(4)
    ]


@pytest.mark.timeout(150)
def test_a_hierarchy_sends_one_vector_a_host_between_the_hosts() -> None:
    """A ring of four ranks sends 2 · 3/4 vectors from host to host, one of two roots 2 · 1/2."""
    told = [json.loads(line) for line in on_two_hosts("ways.py") if line.startswith("[")]
    crossed = {way: sent / payload for way, payload, sent, _ in told}
    assert 1.5 < crossed["ring"] < 1.6 and 1.0 < crossed["hierarchical"] < 1.1, crossed
    assert 0.9 < crossed["central"] < 2.2, crossed


@pytest.mark.timeout(150)
def test_a_broadcast_that_is_over_at_once_is_left_alone(tmp_path: Path) -> None:
    """Horovod 0.28.1 reads a broadcast's name when MXNet may have freed it: without the edit, a segmentation fault."""
    library = tmp_path / "slow_unlock.so"
    compiled = run(["cc", "-shared", "-fPIC", "-o", str(library), str(ROOT / "tests" / "slow_unlock.c"), "-ldl"], 30)
    assert compiled.returncode == 0, compiled.stderr
    rank = [str(find("mxnet").python), str(ROOT / "tests" / "broadcast_rank.py")]
    done = run(rank, timeout=100, env={**os.environ, "LD_PRELOAD": str(library), "HOROVOD_IDLE_CYCLE_TIME": "100"})
    assert (done.returncode, done.stdout) == (0, "all over\n"), done.stderr
