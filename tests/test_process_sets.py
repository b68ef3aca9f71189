"""Horovod's own edge: process sets over two hosts whose names resolve to loopback, as Debian's hosts file has it.

Horovod 0.28.1 opens a process set's connections on whatever interface the host's name leads to; the build mends it
(hvdkit/runtimes/edits.py). Without the edit every rank dies with `connect [127.0.1.1]: Connection refused`.
"""

from __future__ import annotations

import os
import sys

import pytest
from conftest import ROOT, run

from hvdkit.runtimes.store import find


@pytest.mark.timeout(150)
def test_process_sets_reach_the_other_host() -> None:
    namespaces = ["unshare", "-nm"] if os.geteuid() == 0 else ["unshare", "-Urnm"]
    folder = ROOT / "tests" / "hosts"
    ranks = [str(folder / "two_hosts.py"), str(find("mxnet").python), str(folder / "process_sets.py")]
    done = run([*namespaces, sys.executable, *ranks], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "sums are right" in line) == [
        f"rank {rank}: sums are right" for rank in range(4)
    ]
