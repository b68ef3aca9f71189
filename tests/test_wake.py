"""A Horovod of hvdkit's wakes when a tensor comes, whatever its cycle time is (hvdkit/runtimes/edits.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch import direct
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.runtimes.store import find

TURNS, CYCLE_S = 6, 5

# As released, Horovod looks for tensors each CYCLE_S: the turns would take TURNS × CYCLE_S.
RANK = f"""
import os, sys, time
import numpy as np
from hvdkit import adapters
adapter = adapters.load(sys.argv[1])
rank = adapter.init("cpu").rank
began = time.monotonic()
for turn in range({TURNS}):
    time.sleep(0.2 * (rank == turn % 2))  # the other rank is there first, and waits
    (total,) = adapter.allreduce([adapter.from_numpy(np.full(3, rank + turn, np.float32))], "sum", f"turn.{{turn}}")
    assert adapter.to_numpy(total).tolist() == [2 * turn + 1] * 3
print("took", time.monotonic() - began)
time.sleep(1.0)  # idle, behind its last cycle: leaving must wake it too
left = time.monotonic()
adapter.shutdown()
print("left in", time.monotonic() - left)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", ["pytorch", "mxnet"])
def test_a_tensor_wakes_horovod(tmp_path: Path, framework: str) -> None:
    times = {"HOROVOD_CYCLE_TIME": str(1000 * CYCLE_S), "HOROVOD_IDLE_CYCLE_TIME": "60000"}
    hosts = parse_hosts(None, 2)
    job = Job(find(framework).python, ["-c", RANK, framework], 2, hosts, times, tmp_path)
    direct.run(job)
    told = [line.split() for rank in range(2) for line in job.log(rank).read_text().splitlines()]
    turns = [float(words[-1]) for words in told if words[:1] == ["took"]]
    leaving = [float(words[-1]) for words in told if words[:1] == ["left"]]
    assert len(turns) == len(leaving) == 2
    assert max(turns) < TURNS * CYCLE_S / 2
    assert max(leaving) < 2 * CYCLE_S
