"""A Horovod of hvdkit's sleeps until there is something to do, and then wakes (hvdkit/runtimes/patches).

No time of a wake is measured: the cycles last an hour, so that a Horovod which sleeps through one of them never ends
the turns, or never leaves, and the test runs into its timeout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.launching import framework_job

TURNS, HOUR_MS = 6, 3_600_000

RANK = f"""
import os, sys, time
import numpy as np
from hvdkit import adapters
from hvdkit.core.group import world_of
adapter = adapters.load(sys.argv[1])
topology = adapter.init("cpu")
rank, world = topology.rank, world_of(topology)
for turn in range({TURNS}):
    time.sleep(0.2 * (rank == turn % 2))  # the other rank is there first, and waits
    mine = adapter.from_numpy(np.full(3, rank + turn, np.float32))
    (total,) = adapter.allreduce([mine], world, "sum", f"turn.{{turn}}")
    assert adapter.to_numpy(total).tolist() == [2 * turn + 1] * 3
print("turned")
time.sleep(1.0)  # idle, behind its last cycle: leaving must wake it too
adapter.shutdown()
print("left")
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", ["pytorch", "mxnet"])
def test_a_tensor_wakes_horovod(tmp_path: Path, framework: str) -> None:
    times = {"HOROVOD_CYCLE_TIME": str(HOUR_MS), "HOROVOD_IDLE_CYCLE_TIME": str(HOUR_MS)}
    (tmp_path / "turns.py").write_text(RANK)
    job = framework_job(framework, tmp_path, tmp_path / "turns.py", framework, **times)
    direct.run(job)
    for rank in range(2):
        assert [line for line in job.log(rank).read_text().splitlines() if line in ("turned", "left")] == [
            "turned", "left",
        ]  # fmt: skip


WAITING = """
import signal, time
from pathlib import Path
import torch
import horovod.torch as hvd

hvd.init()
handled, tensor = Path("handled"), torch.ones(1)
hvd.allreduce(tensor, name="first")
if hvd.rank() == 0:
    signal.signal(signal.SIGALRM, lambda *_: handled.touch())
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    begun, used = time.monotonic(), time.thread_time()
    hvd.synchronize(hvd.allreduce_async(tensor, name="late"))
    share = (time.thread_time() - used) / (time.monotonic() - begun)
    assert share < 0.1, f"it used {share:.0%} of a core"
    print("slept")
else:
    while not handled.exists():  # for ever, if the other rank handles no signal while it waits
        time.sleep(0.05)
    hvd.allreduce(tensor, name="late")
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
def test_a_rank_of_pytorch_sleeps_and_handles_signals_while_it_waits(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING.replace('"handled"', repr(str(tmp_path / "handled"))))
    job = framework_job("pytorch", tmp_path, tmp_path / "waiting.py")
    direct.run(job)
    assert "slept" in job.log(0).read_text()
