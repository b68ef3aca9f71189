"""One rank that trains ResNet-20 with synchronized batch norm beside the same model on all ranks' batches at once:

    python tests/synchronized/rank.py FRAMEWORK REPORT.json

The latter is local batch norm in rank 0 alone. Training is chaotic (docs/parity.md), so before each step all ranks load
the state of that process. Slots are 0 in it, and so are the gradients afterwards.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from layers import BUILD, ODD

from hvdkit import adapters
from hvdkit.core.group import Group
from hvdkit.core.session import Session
from hvdkit.core.state import digest
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, Recipe, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.worker.setup import RankScript, start

WORLD = Group(tuple(range(int(os.environ["HOROVOD_SIZE"]))), int(os.environ["HOROVOD_RANK"]))
ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH = 5, 8
DOCUMENT: dict[str, Any] = {
    "name": "synchronized",
    "model": {"name": "resnet20", "batch_norm": "synchronized"},
    "data": {"name": "digits"},
    "batch_size": BATCH,
    "precision": "fp64",
    "optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9},
    "threads": 1,
}


def build_of(framework: str) -> Any:
    """The recipe script's own code."""
    return runpy.run_path(str(ROOT / "recipes" / framework / "resnet.py"))["build"]


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The relative error; of zeros alone the absolute one."""
    return float(np.linalg.norm(got - wanted) / (np.linalg.norm(wanted) or 1.0))


def with_slots_of_zero(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value * 0 if name.startswith("optimizer.") else value for name, value in state.items()}


def smaller(batch: Batch) -> Batch:
    """The same pictures with 8 × 8 pixels, of which the data set has made them."""
    return Batch(np.ascontiguousarray(batch.inputs[:, ::4, ::4]), batch.targets)


def proof(adapter: Any, framework: str) -> dict[str, Any]:
    """On rank 0 the largest error of each tensor of the state, and of the loss, after any step; on all, digests."""
    recipe = Recipe.model_validate(DOCUMENT)
    setup = start(adapter, RankScript(build_of(framework)), recipe)
    mesh, train = setup.mesh, setup.dataset.train
    shared = setup.session(recipe, setup.strategy(recipe))
    local = recipe.model_copy(update={"model": recipe.model.model_copy(update={"batch_norm": "local"})})
    whole = setup.session(local) if mesh.is_root else None
    errors: dict[str, float] = {}
    size, order = mesh.data.size * BATCH, np.random.default_rng(5).permutation(len(train))
    expected: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        picked = order[np.arange(step * size, (step + 1) * size) % len(order)]
        if whole:
            state = with_slots_of_zero(whole.state())
            for session in (whole, shared):
                session.load_state(state)
                session.set_learning_rate(0.05)
            loss = adapter.to_numpy(whole.train_step([smaller(train.batch(picked))])).mean()
            expected = whole.state() | {"loss": loss}
        shared.broadcast_state(mesh.data)
        shared.set_learning_rate(0.05)
        mine = adapter.to_numpy(shared.train_step([smaller(train.batch(picked[mesh.data.index * BATCH :][:BATCH]))]))
        losses = adapter.allgather_object(float(mine.mean()), mesh.data, name="proof.loss")
        got = shared.state() | {"loss": np.mean(losses)}
        for name, value in expected.items():
            errors[name] = max(errors.get(name, 0.0), error(got[name], value))
    return {"errors": errors, "digest": digest(shared.state())}


def layers(adapter: Any, framework: str) -> dict[str, float]:
    """The largest errors of a step of `layers.BUILD`, with another number of samples on each rank."""
    size, rank = WORLD.size, WORLD.index
    ends = np.cumsum([0, *(5 + 3 * each for each in range(size))])
    random = np.random.default_rng(7)
    x, targets = random.standard_normal((ends[-1], 8)) + 3, random.standard_normal((ends[-1], 8))

    def loss(outputs: Any, targets: Any) -> Any:
        values = adapter.reshape(outputs * outputs * targets, (1, -1)) * 0.1
        return adapter.matmul(values, adapter.transpose(values, (1, 0)))

    def session(synchronized: bool) -> Session:
        model = BUILD[framework](synchronized)
        if synchronized:
            assert adapter.synchronize_batch_norms(model, WORLD)
        strategy = Dense(adapter, WORLD) if synchronized else None
        return Session(adapter, model, Sgd(learning_rate=0.1), loss, strategy, "fp64")

    shared, whole = session(True), session(False)
    shared.load_state(whole.state())
    mine = slice(ends[rank], ends[rank + 1])
    got = shared.gradients(Batch(x[mine], targets[mine]))
    wanted = whole.gradients(Batch(x, targets))
    found = {"outputs": error(got.outputs, wanted.outputs[mine])}
    pairs = [(name, size * got.averaged[name], value) for name, value in wanted.own.items()]
    pairs += [(name, shared.buffers()[name], value) for name, value in whole.buffers().items()]
    if framework == "mxnet":  # updates the statistics of a layer that is used twice in the order of backward
        pairs = [pair for pair in pairs if not pair[0].startswith("last.running")]
    # What comes before another batch norm has gradients of 0, but for rounding.
    found |= {name: float(np.linalg.norm(a - b) / max(1.0, np.linalg.norm(b))) for name, a, b in pairs}
    for _ in range(1 + rank):  # in evaluation mode ranks are on their own: some see more batches
        predicted = shared.predict(x[mine])
    whole.load_state(shared.state())
    found["evaluation, in bits"] = float(not np.array_equal(predicted, whole.predict(x[mine])))
    return found


def refusals(adapter: Any, framework: str) -> dict[str, Any]:
    """What is said of models with layers that cannot be synchronized, and which layers claim that they are."""

    def said(work: Any) -> str:
        try:
            return f"accepted: {work()}"
        except RequestError as error:
            return str(error)

    def session(model: Any) -> Session:
        return Session(adapter, model, Sgd(learning_rate=0.1), Loss(), precision="fp64")

    told: dict[str, Any] = {name: said(partial(work, adapter)) for name, work in ODD[framework].items()}
    told["claims"] = adapter.synchronize_batch_norms(BUILD[framework](True), WORLD, every=False)
    told["a loop without"] = said(partial(session, BUILD[framework](True)))
    return told


def main(framework: str, report: Path) -> None:
    adapter: Any = adapters.load(framework)
    told: dict[str, Any] = {"proof": proof(adapter, framework)}
    if WORLD.size == 2:
        told |= {"layers": layers(adapter, framework), "refusals": refusals(adapter, framework)}
    everyone = adapter.allgather_object(told, WORLD, name="told")
    if WORLD.index == 0:
        report.write_text(json.dumps(everyone))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
