"""An elastic program in the form of Horovod's documentation. A rank that joins kills the first one: `joins.py FOLDER
WHEN`, before it is ready itself (starts), once it has got its numbers (connects), or in the first batch (trains); or it
ends (dies), or its host is not reached (ssh).
"""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

folder, when = Path(sys.argv[1]), sys.argv[2]
first, killed = folder / "first", folder / "killed"
joins = first.exists()


def now(at: str) -> None:
    """The rank that joins does its deed at this time."""
    if joins and when == at and first.exists():
        first.rename(killed)
        os.kill(int(killed.read_text()), signal.SIGKILL)
        time.sleep(1)  # the others notice


if joins and when == "dies":
    first.rename(killed)
    sys.exit("no such library")
now("starts")
connect = hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_init


def init(*arguments: object) -> object:
    now("connects")
    return connect(*arguments)


hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_init = init
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    print(f"from batch {state.batch} with {hvd.size()}")
    now("trains")
    while state.rests < 3:
        optimizer.zero_grad()
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
        state.batch += 1
        time.sleep(0.05)
        if state.batch % 5 == 0:
            state.rests += hvd.broadcast_object(killed.exists(), root_rank=0)
            state.commit()
        if state.batch == 20 and hvd.rank() == 0 and not killed.exists():
            first.write_text(str(os.getpid()))
            (folder / "slots").write_text("localhost:2\n192.0.2.7:1\n" if when == "ssh" else "localhost:3\n")
    print("trained")


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, rests=0))
