"""Horovod names the tensor and the ranks of a collective that waits or does not fit (hvdkit/runtimes/patches).

No time is measured: a missing rank comes as soon as it reads its own name in the log, so a Horovod that never names
it runs into the timeout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.launching import framework_job

pytestmark = pytest.mark.usefixtures("warm")

COMMON = """
import sys, time
from pathlib import Path
import mxnet
import horovod.mxnet as hvd

LOGS = Path(sys.argv[2])
pair = hvd.ProcessSet([1, 2])
hvd.init(process_sets=[pair] if sys.argv[3] == "3" else None)
rank = hvd.rank()

def reduced(name, **options):
    return hvd.allreduce(mxnet.nd.ones(3), average=False, name=name, **options).asnumpy().tolist()

def wait_for(rank, says):
    while not says((LOGS / f"rank-{rank}.log").read_text()):
        time.sleep(0.05)

def missing(rank, name):
    return lambda log: log.endswith(f"Missing ranks:\\n{rank}: [horovod_allreduce.{name}]\\n")
"""

NAMED = """
assert reduced("known") == [3] * 3  # from now on in the response cache
for name in ("new", "known"):
    if rank == 1:
        wait_for(0, missing(1, name))
    assert reduced(name) == [3] * 3
if rank == 2:
    wait_for(1, missing(2, "of the pair"))
if rank:
    assert reduced("of the pair", process_set=pair) == [2] * 3
"""

# The first rank to leave shuts Horovod down.
LEFT = """
print("done")
for other in range(int(sys.argv[3])):
    wait_for(other, lambda log: "done" in log)
"""

MISMATCHED = """
def failure(call):
    try:
        call()
    except mxnet.MXNetError as error:
        return str(error)

shapes = failure(lambda: hvd.allreduce(mxnet.nd.ones(4 + (rank == 1)), name="norm").asnumpy())
assert "norm: rank 0, 2: ALLREDUCE float32 [4]; rank 1: ALLREDUCE float32 [5]." in shapes, shapes
if rank:
    kind = "float32" if rank == 1 else "float64"
    types = failure(lambda: hvd.allreduce(mxnet.nd.ones(3, dtype=kind), name="pair", process_set=pair).asnumpy())
    assert "pair: rank 1: ALLREDUCE float32 [3]; rank 2: ALLREDUCE float64 [3]." in types, types
roots = failure(lambda: hvd.broadcast(mxnet.nd.ones(2), root_rank=rank % 2, name="root").asnumpy())
assert "root: rank 0, 2: BROADCAST float32 [2] from rank 0; rank 1: BROADCAST float32 [2] from rank 1." in roots, roots
"""

ENDED = """
if rank == 0:
    try:
        reduced("never")
    except mxnet.MXNetError as error:
        print("failed:", "Horovod has been shut down" in str(error))
wait_for(0, lambda log: "failed: True" in log)
"""


def _run(folder: Path, script: str, np: int, **times: str) -> str:
    """Rank 0's log."""
    (folder / "rank.py").write_text(COMMON + script + LEFT)
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", **times}
    job = framework_job("mxnet", folder, folder / "rank.py", "mxnet", folder, np, np=np, **variables)
    direct.run(job)
    return job.log(0).read_text()


@pytest.mark.timeout(120)
def test_the_tensor_and_the_missing_ranks_are_named(tmp_path: Path) -> None:
    """A tensor that is new, one of which the response is cached, and one of a process set."""
    _run(tmp_path, NAMED, 3)


@pytest.mark.timeout(120)
def test_a_stall_shuts_horovod_down_if_asked(tmp_path: Path) -> None:
    log = _run(tmp_path, ENDED, 2, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2")
    assert "\n1!: [horovod_allreduce.never]\n" in log


@pytest.mark.timeout(120)
def test_what_each_rank_asked_for_is_named_where_it_does_not_fit(tmp_path: Path) -> None:
    """Shapes, types in a process set, and roots."""
    _run(tmp_path, MISMATCHED, 3)
