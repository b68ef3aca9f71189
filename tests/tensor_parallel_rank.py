"""One rank of a mesh with a tensor axis of two: `python tests/tensor_parallel_rank.py FOLDER`. Rank 0 reports in it.

Two layers as in Megatron-LM (Shoeybi et al. 2019, section 3): the first one's matrix and bias are divided by rows, the
second one's matrix by columns, its bias is whole on each rank. Beside it each rank trains the whole model on the
batches of all data ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdkit import adapters
from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.snapshots import Checkpoint, CheckpointRecord
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.core.group import Group, Mesh, sets
from hvdkit.core.pieces import Partition
from hvdkit.core.session import Session
from hvdkit.core.slices import sliced
from hvdkit.core.state import digest
from hvdkit.core.step_plan import Progress
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, AverageWeights, Checkpointing, Lamb, Lars, Loss, Optimizer, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.tasks.parts import Cut

INPUTS, HIDDEN, CLASSES, BATCH, STEPS = 12, 8, 10, 6, 3
SHAPES = {"first.weight": (HIDDEN, INPUTS), "first.bias": (HIDDEN,), "second.weight": (CLASSES, HIDDEN)}
AXES = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Sgd(learning_rate=0.1, clip_norm=0.5),
    "adamw": AdamW(learning_rate=0.1, weight_decay=0.1, decay="weights", clip_norm=0.5),
    "lars": Lars(learning_rate=0.1, weight_decay=0.1, trust_coefficient=0.1),
    "lamb": Lamb(learning_rate=0.1, weight_decay=0.1, clip_norm=0.5),
}
RECORD = CheckpointRecord(
    progress=Progress(step=STEPS), np=2, framework="pytorch", framework_version="1", hvdkit_version="1", recipe={}
)
adapter: Any = adapters.load("pytorch")


class Summed(torch.autograd.Function):
    """The sum over a group; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        summed: torch.Tensor = adapter.allreduce([tensor.detach()], group, "sum", "layers.sum")[0]
        return summed

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Layers(torch.nn.Module):
    """Both layers, or with a group this rank's part of them."""

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self.group, width = group, HIDDEN // (group.size if group else 1)
        self.first, self.second = torch.nn.Linear(INPUTS, width), torch.nn.Linear(width, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = functional.linear(torch.relu(self.first(inputs)), self.second.weight)
        return (outputs if self.group is None else Summed.apply(outputs, self.group)) + self.second.bias


class TensorParallel(Dense):
    """Gradients are averaged over the data axis, and the layers divided over the tensor axis."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(adapter, mesh.data)
        self._tensor = mesh.tensor

    def partition(self, settings: Optimizer) -> Partition:
        pieces = {name: sliced(name, SHAPES[name], Cut(axis), self._tensor) for name, axis in AXES.items()}
        return Partition(adapter, self.session.trainable.parameters, pieces)

    def average(self, gradients: dict[str, Any]) -> dict[str, Any]:
        return super().average(gradients) if self.group.size > 1 else gradients


def batch(step: int, rank: int) -> Batch:
    random = np.random.default_rng([step, rank])
    inputs = random.standard_normal((BATCH, INPUTS)).astype(np.float32)
    return Batch(inputs, random.integers(0, CLASSES, BATCH))


def joined(batches: list[Batch]) -> Batch:
    both = zip(*((each.inputs, each.targets) for each in batches), strict=True)
    return Batch(*(np.concatenate(arrays) for arrays in both))


def error(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    assert got.keys() == wanted.keys()
    return max(float(np.linalg.norm(got[name] - wanted[name]) / (np.linalg.norm(wanted[name]) or 1)) for name in wanted)


def trained(mesh: Mesh, optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """How far the divided model is from the whole one after some steps, and whether its state is read and loaded."""
    adapter.seed(3)
    divided = Session(adapter, Layers(mesh.tensor), optimizer, Loss(), TensorParallel(mesh), "fp64")
    whole = Session(adapter, Layers(), optimizer, Loss(), Strategy(), "fp64")
    for session in (divided, whole):
        session.keep_average(AverageWeights(decay=0.5))
    random = np.random.default_rng(7)  # other values everywhere, slots too, the same on all ranks
    start = {name: np.asarray(value + random.random(value.shape), value.dtype) for name, value in whole.state().items()}
    for session in (divided, whole):
        session.load_state(start)
    loaded = divided.state()
    for step in range(STEPS):
        divided.train_step([batch(step, mesh.data.index)])
        whole.train_step([joined([batch(step, rank) for rank in range(mesh.data.size)])])
    state, layout, streamed = divided.state(), divided.state_layout(), divided.state_arrays(keep=mesh.is_root)
    far = error(state, whole.state())
    files: list[str] = []
    if mesh.is_root:
        for number in range(2):
            checkpoints = Checkpoints(folder / str(number), Checkpointing(), "accuracy")
            if number:
                checkpoints.write(Checkpoint(RECORD, state))
            else:
                checkpoints.write_each(RECORD, layout, streamed)
            checkpoints.wait()
            files.append(digest(snapshots.read(folder / str(number) / "last").state))
    else:
        assert not list(streamed)
    if mesh.data.size > 1:
        own = divided.trainable.parameters["first.weight"]
        adapter.assign(own, own + mesh.data.index)
        divided.broadcast_state(mesh.data)
    again = divided.state()
    return {
        "loaded": all(np.array_equal(loaded[name], start[name]) for name in start),
        "far": far,
        "broadcast": all(np.array_equal(again[name], state[name]) for name in state),
        "files": not files or files == [digest(state)] * 2,
        "digest": digest(divided.model_arrays()) == digest(sorted((each, state[each]) for each in whole.model_state())),
        "bytes": [session.state_bytes()[kind] for session in (divided, whole) for kind in ("parameters", "optimizer")],
    }


def overflowed(mesh: Mesh) -> dict[str, Any]:
    """An infinite gradient in one rank's part alone."""
    session = Session(adapter, Layers(mesh.tensor), Sgd(learning_rate=0.1), Loss(), TensorParallel(mesh), "fp16")
    before = session.state()
    gradients = {name: torch.ones_like(tensor) for name, tensor in session.trainable.parameters.items()}
    if mesh.tensor.index == mesh.tensor.size - 1:
        gradients["second.weight"][0, 0] = np.inf
    session.update(gradients)
    after = session.state()
    return {"changed": sorted(name for name in before if not np.array_equal(before[name], after[name]))}


def main(folder: Path) -> None:
    size = int(os.environ["HOROVOD_SIZE"])
    world = adapter.init("cpu", threads=1, sets=sets(size, tensor_size=2))
    mesh = Mesh(world, tensor_size=2, process_set=adapter.process_set)
    found = {name: trained(mesh, optimizer, folder / name) for name, optimizer in OPTIMIZERS.items()}
    everyone = adapter.allgather_object({"trained": found, "overflow": overflowed(mesh)}, mesh.world, name="report")
    if mesh.is_root:
        (folder / "report.json").write_text(json.dumps(everyone))
    adapter.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
