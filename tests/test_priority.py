"""`order: priority`: an urgent tensor overtakes others in Horovod, and layers updated one by one have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.launching import framework_job

# In the order of the first round, which is that of Horovod's cache, the urgent tensor is last: unless it overtakes,
# all others are done when it is.
OVERTAKING = """
import torch
import horovod.torch as hvd

hvd.init()
rank, tensors = hvd.rank(), [torch.full((10**6,), float(number)) for number in range(25)]
names = [f"piece.{number}.priority.{25 - number}" for number in range(25)]
for tensor, name in zip(tensors, names):
    hvd.allreduce_(tensor, name=name)
most = 0
for _ in range(10):
    handles = [hvd.allreduce_async_(tensor, name=name) for tensor, name in zip(tensors, names)]
    hvd.synchronize(handles[-1])
    most = max(most, sum(not hvd.poll(handle) for handle in handles[:-1]))
    for handle in handles[:-1]:
        hvd.synchronize(handle)
for number, tensor in enumerate(tensors):
    assert tensor.eq(number).all()
print("overtook" if most else "waited")
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("credit", "wanted"), [("4000000", "overtook"), ("0", "waited")])
def test_an_urgent_tensor_overtakes_those_that_wait(tmp_path: Path, credit: str, wanted: str) -> None:
    (tmp_path / "rank.py").write_text(OVERTAKING)
    job = framework_job("pytorch", tmp_path, tmp_path / "rank.py", HOROVOD_CREDIT_BYTES=credit)
    direct.run(job)
    assert [job.log(rank).read_text().split() for rank in range(2)] == [[wanted]] * 2


# A model with a tied weight, one that is used beside its layer, batch norm, and a parameter that rank 1 does not use.
TRAINING = """
import sys
import numpy as np
import torch
from torch import nn
from hvdkit import adapters
from hvdkit.core.group import Mesh
from hvdkit.core.session import Session
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, Lamb, Loss, Sgd
from hvdkit.strategies import priority
from hvdkit.strategies.dense import Dense

adapter = adapters.load("pytorch")
topology = adapter.init("cpu")
mesh, rank = Mesh(topology), topology.rank

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(40, 30)
        self.aside = nn.Linear(30, 30)
        self.norm = nn.BatchNorm1d(30)
        self.unused = nn.Linear(30, 30)
        self.out = nn.Linear(30, 40, bias=False)
        self.out.weight = nn.Parameter(self.table.weight.t().contiguous().detach())
        self.tied = nn.Linear(40, 30, bias=False)
        self.tied.weight = self.table.weight
        self.last = nn.Linear(30, 7)

    def forward(self, x):
        x = torch.tanh(self.table(x))
        x = self.norm(torch.nn.functional.linear(x, self.aside.weight, self.aside.bias))
        if rank == 0:
            x = self.unused(x)
        return self.last(torch.tanh(self.tied(self.out(x))))

def batch(step):
    random = np.random.default_rng([rank, step])
    return Batch(random.standard_normal((8, 40)).astype(np.float32), random.integers(0, 7, 8))

def trained(strategy, optimizer, accumulate, loss):
    torch.manual_seed(1)
    session = Session(adapter, Net(), optimizer, loss, strategy)
    told = []
    for step in range(6):
        session.set_learning_rate(0.1 / (1 + step))
        loss = session.train_step([batch(10 * step + number) for number in range(accumulate)])
        told.append(float(loss))
        if step == 2:
            told += session.predict(batch(99).inputs).reshape(-1).tolist()
        if step == 3:
            told += sum(float(np.abs(each).sum()) for each in session.gradients(batch(98)).averaged.values()),
        if step == 4:
            told += session.weights().tolist()
    return told, session.state()

for number, (optimizer, piece, accumulate, loss) in enumerate([
    (Sgd(learning_rate=0.1, momentum=0.9, weight_decay=1e-3), 1000, 1, Loss()),
    (Sgd(learning_rate=0.1), 4 * 10**6, 1, Loss()),
    (AdamW(learning_rate=0.1), 300, 2, Loss()),
    (Lamb(learning_rate=0.1), 1000, 1, Loss(label_smoothing=0.1)),
    (Sgd(learning_rate=0.1), 1000, 1, Loss(ignored_label=3)),
]):
    priority.PIECE_BYTES = piece
    by_layer = priority.Priority(adapter, mesh.data, f"{number}.priority.of")
    dense = Dense(adapter, mesh.data, accumulate=accumulate, name=f"{number}.dense")
    told, state = trained(by_layer, optimizer, accumulate, loss)
    wanted, other = trained(dense, optimizer, accumulate, loss)
    assert told == wanted, (number, [pair for pair in zip(told, wanted) if pair[0] != pair[1]][:3])
    assert state.keys() == other.keys()
    for name in other:
        assert np.array_equal(state[name], other[name]), (number, name)
    assert not by_layer._left and not by_layer._under_way

session = Session(adapter, Net(), Sgd(learning_rate=0.1), Loss(), last := priority.Priority(adapter, mesh.data, "left"))
session.train_step([batch(1)])
assert len(last._left) == len(last._units), "the update waits for the next forward"
session.complete()
adapter.shutdown()
print("same bits")
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("ranks", "memory"), [(2, "0"), (3, "1")])
def test_layers_that_are_updated_one_by_one_have_the_same_bits(tmp_path: Path, ranks: int, memory: str) -> None:
    """Losses, predictions, gradients, weights and slots, with a tied weight, weights used elsewhere and unused ones.

    Two ranks add up over Gloo, and three in shared memory: sums do not depend on where in a vector an element is.
    """
    (tmp_path / "rank.py").write_text(TRAINING)
    settings = {"HOROVOD_CREDIT_BYTES": "1000", "HOROVOD_SHARED_MEMORY": memory}
    job = framework_job("pytorch", tmp_path, tmp_path / "rank.py", np=ranks, **settings)
    direct.run(job)
    assert [job.log(rank).read_text().splitlines()[-1] for rank in range(ranks)] == ["same bits"] * ranks
