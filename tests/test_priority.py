"""`order: priority`: an urgent tensor overtakes others in Horovod, and layers updated one by one have the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hvdkit
from hvdkit.launch.launchers import direct
from tests.launching import framework_job

pytestmark = pytest.mark.long

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


# Models with a tied weight, batch norm, and a parameter that rank 1 does not use; PyTorch's has one that is used beside
# its layer.
NETS = {
    "pytorch": """
import torch
from torch import nn

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

def net():
    torch.manual_seed(1)
    return Net()
""",
    "mxnet": """
import mxnet as mx
from mxnet.gluon import nn
from hvdkit.adapters.mxnet.batch_norm import BatchNorm

class Net(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.table = nn.Dense(30, in_units=40)
            self.image = nn.Conv2D(6, 3, in_channels=1)
            self.norm = BatchNorm(6, 0.9, 1e-5)
            self.narrow = nn.Dense(30, in_units=72)
            self.unused = nn.Dense(30, in_units=30)
            self.out = nn.Dense(40, in_units=30, use_bias=False)
            self.tied = nn.Dense(30, in_units=40, params=self.table.params)
            self.last = nn.Dense(7, in_units=30)

    def hybrid_forward(self, F, x):
        x = F.tanh(self.table(x))
        x = self.narrow(F.relu(self.norm(self.image(x.reshape((-1, 1, 5, 6))))))
        if rank == 0:
            x = self.unused(x)
        return self.last(F.tanh(self.tied(self.out(x))))

def net():
    mx.random.seed(1)
    np.random.seed(1)
    made = Net()
    made.initialize(mx.init.Xavier())
    return made
""",
}

TRAINING = """
import sys
import numpy as np
from hvdkit import adapters
from hvdkit.core.group import Mesh
from hvdkit.core.session import Session
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, Lamb, Loss, Sgd
from hvdkit.strategies import priority
from hvdkit.strategies.dense import Dense

adapter = adapters.load(sys.argv[1])
topology = adapter.init("cpu")
mesh, rank = Mesh(topology), topology.rank
# NET

def batch(step):
    random = np.random.default_rng([rank, step])
    return Batch(random.standard_normal((8, 40)).astype(np.float32), random.integers(0, 7, 8))

def trained(strategy, optimizer, accumulate, loss):
    session = Session(adapter, net(), optimizer, loss, strategy)
    told = []
    for step in range(6):
        session.set_learning_rate(0.1 / (1 + step))
        loss = session.train_step([batch(10 * step + number) for number in range(accumulate)])
        told.append(float(adapter.to_numpy(loss).mean()))
        if step == 2:
            told += session.predict(batch(99).inputs).reshape(-1).tolist()
        if step == 3:
            told += sum(float(np.abs(each).sum()) for each in session.gradients(batch(98)).averaged.values()),
        if step == 4:
            told += adapter.to_numpy(session.weights()).tolist()
    return told, session.state()

for number, (optimizer, piece, accumulate, loss, half) in enumerate([
    (Sgd(learning_rate=0.1, momentum=0.9, weight_decay=1e-3), 1000, 1, Loss(), False),
    (Sgd(learning_rate=0.1), 4 * 10**6, 1, Loss(), False),
    (AdamW(learning_rate=0.1), 300, 2, Loss(), False),
    (Lamb(learning_rate=0.1), 1000, 1, Loss(label_smoothing=0.1), False),
    (Sgd(learning_rate=0.1), 1000, 1, Loss(ignored_label=3), False),
    (Sgd(learning_rate=0.1, momentum=0.9), 1000, 1, Loss(), True),
    (AdamW(learning_rate=0.1), 300, 2, Loss(), True),
]):
    priority.PIECE_BYTES = piece
    by_layer = priority.Priority(adapter, mesh.data, half, f"{number}.priority.of")
    dense = Dense(adapter, mesh.data, half, accumulate=accumulate, name=f"{number}.dense")
    told, state = trained(by_layer, optimizer, accumulate, loss)
    wanted, other = trained(dense, optimizer, accumulate, loss)
    assert told == wanted, (number, [pair for pair in zip(told, wanted) if pair[0] != pair[1]][:3])
    assert state.keys() == other.keys()
    for name in other:
        assert np.array_equal(state[name], other[name]), (number, name)
    assert not by_layer._left and not by_layer._under_way

last = priority.Priority(adapter, mesh.data, name="left")
session = Session(adapter, net(), Sgd(learning_rate=0.1), Loss(), last)
session.train_step([batch(1)])
if not session.trainable.queued:
    assert len(last._left) == len(last._units), "the update waits for the next forward"
session.complete()
adapter.shutdown()
print("same bits")
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("ranks", "memory"), [(3, "1"), pytest.param(2, "0", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("framework", list(NETS))
def test_layers_that_are_updated_one_by_one_have_the_same_bits(
    tmp_path: Path, framework: str, ranks: int, memory: str
) -> None:
    """Losses, predictions, gradients, weights and slots, with a tied weight, weights used elsewhere and unused ones.

    Two ranks add up over Gloo, and three in shared memory: sums do not depend on where in a vector an element is.
    """
    (tmp_path / "rank.py").write_text(TRAINING.replace("# NET", NETS[framework]))
    settings = {"HOROVOD_CREDIT_BYTES": "1000", "HOROVOD_SHARED_MEMORY": memory}
    job = framework_job(framework, tmp_path, tmp_path / "rank.py", framework, np=ranks, **settings)
    direct.run(job)
    assert [job.log(rank).read_text().splitlines()[-1] for rank in range(ranks)] == ["same bits"] * ranks


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("recipe", "framework"),
    [
        ("gpt-tiny", "pytorch"),
        pytest.param("gpt-tiny", "mxnet", marks=pytest.mark.thorough),
        pytest.param("resnet20-digits", "mxnet", marks=pytest.mark.thorough),
    ],
)
def test_a_run_ends_with_the_same_weights(tmp_path: Path, recipe: str, framework: str) -> None:
    """The table of tokens is used at the start and tied to the output at the end; evaluation needs all updates."""
    changes: dict[str, Any] = {"steps": 6, "threads": 1, "check_ranks": 2, "log_every": 1, "checkpoint": None}
    if recipe == "gpt-tiny":  # in some ten units, of one to four pieces
        changes |= {"model.width": 256, "optimizer.clip_norm": None, "batch_size": 1, "data.validation": 0.01}
    runs = [
        hvdkit.train(recipe, changes | {"order": order}, framework=framework, np=2, out=tmp_path / order)
        for order in ("none", "priority")
    ]
    assert runs[0].final_weights_sha256 == runs[1].final_weights_sha256 != runs[0].initial_state_sha256
    assert runs[0].validation == runs[1].validation
    losses = [(tmp_path / order / "metrics.jsonl").read_text().splitlines() for order in ("none", "priority")]
    assert [json.loads(line).get("loss") for line in losses[0]] == [json.loads(line).get("loss") for line in losses[1]]
