"""How many messages a Horovod of hvdkit's needs to agree on a small collective over Gloo (hvdkit/runtimes/patches).

TCP segments are counted, not timed: Gloo writes a message as one, and each rank announces it by at most one more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.conftest import rest_thorough
from tests.launching import framework_job

HOUR_MS = 3_600_000
SOCKETS = {"HOROVOD_SHARED_MEMORY": "0"}

COMMON = """
import os, socket, struct, sys
import torch
import horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
"""

COUNTED = (
    COMMON
    + """
from hvdkit.adapters.pytorch import adapter
from hvdkit.core.group import Group

DATA_SEGMENTS_OUT = 156  # the field's offset in the kernel's struct tcp_info

def sent():
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as connection:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:  # no TCP socket, or the folder's own descriptor
            continue
        total += struct.unpack_from("I", information, DATA_SEGMENTS_OUT)[0]
    return total

def segments(collective, times=200):
    collective()  # from now on in the response cache
    hvd.barrier()
    before = sent()
    for _ in range(times):
        collective()
    return (sent() - before) / times

for number in range(250):  # four words of bits, which Gloo's ring sends apart
    hvd.allreduce(torch.ones(1), name=f"known.{number}")
pair, both = torch.ones(2), Group((0, 1), rank)
# One message to agree, and one with an element: with their announcements at most six.
for name, collective in (
    ("allgather", lambda: hvd.allgather(torch.ones(1), name="gathered")),
    ("reducescatter", lambda: hvd.reducescatter(pair, name="scattered")),
    ("message", lambda: adapter.start_broadcast(pair, both, 0, "message")()),  # of a pipeline
):
    count = segments(collective)
    assert count < 6.5, f"{name}: {count} segments"
    print(name, count, "counted")
"""
)

# Some ranks are ready before others, with other tensors.
AGREED = (
    COMMON
    + """
import random, time
drawn = random.Random(rank)
for turn in range(30):
    names = [f"tensor.{number}" for number in range(5)]
    drawn.shuffle(names)
    handles = {}
    for name in names:
        time.sleep(0.002 * drawn.random())
        start = hvd.reducescatter_async if name == "tensor.4" else hvd.allreduce_async
        value = torch.full((size,), float(rank + int(name[-1]) + turn))
        handles[name] = start(value, op=hvd.Sum, name=name)
    for name, handle in handles.items():
        expected = sum(other + int(name[-1]) + turn for other in range(size))
        assert (hvd.synchronize(handle) == expected).all(), (turn, name)
print("agreed")
"""
)

JOINED = (
    COMMON
    + """
scattered = torch.ones(2)
for _ in range(2):
    hvd.reducescatter(scattered, name="scattered")
if rank == 0:
    hvd.join()
else:
    try:
        hvd.reducescatter(scattered, name="scattered")
    except hvd.mpi_ops.HorovodInternalError as error:
        assert "Reducescatter is not supported with Join" in str(error), error
        print("refused")
    hvd.join()
"""
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("warm"), pytest.mark.timeout(120)]


def lines(folder: Path, script: str, np: int, **environment: str) -> list[list[str]]:
    (folder / "rank.py").write_text(script)
    job = framework_job("pytorch", folder, folder / "rank.py", np=np, **environment)
    direct.run(job)
    return [job.log(rank).read_text().splitlines() for rank in range(np)]


def test_a_repeated_collective_takes_one_message_to_agree(tmp_path: Path) -> None:
    for log in lines(tmp_path, COUNTED, 2, HOROVOD_CYCLE_TIME="1", HOROVOD_IDLE_CYCLE_TIME=str(HOUR_MS), **SOCKETS):
        counted = [line.split()[0] for line in log if line.endswith("counted")]
        assert counted == ["allgather", "reducescatter", "message"]


@pytest.mark.parametrize("np", rest_thorough(3, 2, 5))
def test_ranks_agree_whatever_is_ready_first(tmp_path: Path, np: int) -> None:
    for log in lines(tmp_path, AGREED, np, **(SOCKETS if np > 2 else {})):
        assert "agreed" in log


def test_a_known_reduce_scatter_is_refused_after_a_join(tmp_path: Path) -> None:
    assert "refused" in lines(tmp_path, JOINED, 2)[1]
