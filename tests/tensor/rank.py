"""One rank of four that trains a GPT in parts, beside the whole model on the batches of all ranks:

    python tests/tensor/rank.py FRAMEWORK REPORT.json

Before each step of the `forced` ones both load one state. Each fault that is planted is to be seen in the gradients, or
in the weights after a step.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core.group import Mesh, sets
from hvdkit.core.pieces import sum_of_squares
from hvdkit.core.session import Session
from hvdkit.core.slices import pieces_of
from hvdkit.core.state import digest
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, AverageWeights, Lamb, Lars, Loss, Optimizer, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.tasks.gpt import GPT
from hvdkit.worker.parity_trace import error as far
from hvdkit.worker.parity_trace import errors

ROOT = Path(__file__).resolve().parents[2]
STEPS, RANKS, SAMPLES = 20, 4, 2
# 37 tokens: unequal parts of the vocabulary
TABLE = GPT("gpt", layers=2, heads=4, width=16, context=8, vocabulary=37, dtype="float64", compute_dtype="float64")
ADAMW = AdamW(learning_rate=0.01, weight_decay=0.1, decay="weights", clip_norm=0.5)
# Rules of core, which one framework is enough for.
OTHERS: dict[str, list[Optimizer]] = {
    "pytorch": [
        Sgd(learning_rate=0.1, momentum=0.9, clip_norm=0.5),
        Lamb(learning_rate=0.01, weight_decay=0.1, clip_norm=0.5),
        Lars(learning_rate=0.1, weight_decay=0.1, trust_coefficient=0.1),
    ]
}


def build_of(framework: str, script: str = "gpt") -> Any:
    """The recipe script's own model."""
    return runpy.run_path(str(ROOT / "recipes" / framework / f"{script}.py"))["build"]


def batch(step: int, ranks: range) -> Batch:
    """The samples of these ranks of the data axis, one rank's after the other's."""
    samples = [
        np.random.default_rng([step, rank]).integers(0, TABLE.vocabulary, (SAMPLES, TABLE.context + 1))
        for rank in ranks
    ]
    both = np.concatenate(samples)
    return Batch(both[:, :-1].copy(), both[:, 1:].copy())


class Pair:
    """A model in parts, and the whole one, of the same values everywhere."""

    def __init__(
        self,
        framework: str,
        mesh: Mesh,
        optimizer: Optimizer,
        loss: Loss | None = None,
        precision: str = "fp64",
        table: GPT = TABLE,
        average: bool = False,
    ) -> None:
        adapter, build, loss = adapters.load(framework), build_of(framework), loss or Loss()
        pieces = pieces_of(TABLE, mesh.tensor)
        self.all, self.own = range(mesh.data.size), range(mesh.data.index, mesh.data.index + 1)
        own = replace(table, tensor=mesh.tensor)
        self.parts = Session(
            adapter,
            build(own),
            optimizer,
            loss,
            Dense(adapter, mesh.data, accumulate=2),
            precision,
            pieces=pieces,
        )
        adapter.seed(3)  # the same on all ranks
        whole = replace(TABLE, dtype=table.dtype, compute_dtype=table.compute_dtype)
        self.whole = Session(adapter, build(whole), optimizer, loss, Strategy(), precision)
        sessions = (self.parts, self.whole)
        if average:
            for session in sessions:
                session.keep_average(AverageWeights(decay=0.5))
        random = np.random.default_rng(7)  # other values everywhere, slots too, the same on all ranks
        self.start = {
            name: np.asarray(value + 0.1 * random.random(value.shape), value.dtype)
            for name, value in self.whole.state().items()
        }
        for session in sessions:
            session.load_state(self.start)

    def step(self, number: int, microbatches: int = 1) -> None:
        numbers = range(number * microbatches, (number + 1) * microbatches)
        self.parts.train_step([batch(each, self.own) for each in numbers])
        self.whole.train_step([batch(each, self.all) for each in numbers])

    def gradients(self, number: int) -> dict[str, float]:
        got, wanted = self.parts.gradients(batch(number, self.own)), self.whole.gradients(batch(number, self.all))
        loss = abs(got.loss - wanted.loss) / wanted.loss if self.own == self.all else 0.0
        return errors(got.averaged, wanted.averaged) | {"loss": loss}

    def after(self) -> dict[str, float]:
        """Errors of what this rank has of the state."""
        found, whole = {}, self.whole.state()
        for entry in self.parts._entries():
            for name, piece in entry.partition.pieces.items():
                own = piece.of({name: whole[entry.prefix + name]})
                found[entry.prefix + name] = far(self.parts.array(entry.tensors[name]), own)
        return found


def most(found: list[dict[str, float]]) -> dict[str, float]:
    """The largest error of each tensor."""
    return {name: max(each[name] for each in found) for name in (found[0] if found else ())}


def trained(framework: str, mesh: Mesh) -> dict[str, Any]:
    """Errors of each of the forced steps, of others without a teacher, and of evaluations; and whether state is read
    and loaded whole."""
    pair = Pair(framework, mesh, ADAMW, Loss(label_smoothing=0.1), average=True)
    loaded = pair.parts.state()
    gradients, weights = [], []
    for number in range(STEPS):
        pair.parts.load_state(pair.whole.state())
        gradients.append(pair.gradients(number))
        pair.step(number)
        weights.append(pair.after())
    free = []
    recomputes = replace(TABLE, recompute="recompute" in adapters.load(framework).CAPABILITIES)
    for optimizer in (ADAMW, *OTHERS.get(framework, [])):
        other = Pair(framework, mesh, optimizer, table=recomputes)
        for number in range(4):
            other.step(number, 1 + number % 2)
        free.append(other.after())
    seen = batch(99, range(1))
    pair.parts.load_state(pair.whole.state())
    losses, outputs = (
        [run(session) for session in (pair.parts, pair.whole)]
        for run in (lambda session: session.trainable.losses(seen), lambda session: session.predict(seen.inputs))
    )
    for group in (mesh.tensor, mesh.data):
        own = pair.parts.trainable.parameters["transformer.wpe.weight"]
        pair.parts.adapter.assign(own, own * (1 + group.index))
        pair.parts.broadcast_state(group)
    again = pair.parts.state()
    same = {name: value for name, value in pair.whole.state().items() if "wpe" not in name}
    return {
        "gradients": most(gradients),
        "weights": most(weights),
        "free": most([{name: error for name, error in each.items() if name in pair.whole.shapes} for each in free]),
        "evaluation": {"losses": far(*losses), "outputs": far(*outputs)},
        "loaded": all(np.array_equal(loaded[name], pair.start[name]) for name in pair.start),
        "broadcast": all(np.array_equal(again[name], same[name]) for name in same),
        "digest": digest(pair.parts.model_arrays()),
        "bytes": [session.state_bytes() for session in (pair.parts, pair.whole)],
    }


def overflowed(framework: str, mesh: Mesh) -> list[str]:
    """What an infinite gradient in one rank's part alone changes."""
    table = replace(TABLE, dtype="float32", compute_dtype="float16")
    pair = Pair(framework, mesh, Sgd(learning_rate=0.1), precision="fp16", table=table)
    session, ops = pair.parts, pair.parts.adapter
    before = session.state()
    gradients = {name: ops.zeros_like(tensor) + 1 for name, tensor in session.trainable.parameters.items()}
    if mesh.tensor.index == mesh.tensor.size - 1:
        gradients["transformer.h.0.mlp.c_fc.weight"] = gradients["transformer.h.0.mlp.c_fc.weight"] * np.inf
    session.compiled(session.update.__call__)(gradients)
    after = session.state()
    return sorted(name for name in before if not np.array_equal(before[name], after[name]))


class Shifted(GPT):
    """Each rank takes its vectors for those of the next tokens."""

    @property
    def vocabulary_part(self) -> tuple[int, int]:
        first, stop = super().vocabulary_part
        return first + 1, stop + 1


def planted(framework: str, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of gradients, and after a step, with each fault."""
    adapter: Any = adapters.load(framework)
    leave, enter = adapter.leave_parts, adapter.enter_parts

    def at(layer: str, right: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, group, name: (wrong if f"{layer}." in name else right)(x, group, name)

    def with_bias(x: Any, group: Any, name: str) -> Any:
        bias = pair.parts.trainable.parameters["transformer.h.1.mlp.c_proj.bias"]
        return leave(x + bias, group, name)

    faults: dict[str, dict[str, Callable[..., Any]]] = {
        "no fault": {},
        "no sum after the rows": {"leave_parts": at("h.1.mlp", leave, lambda x, *_: x)},
        "a sum too many": {"leave_parts": at("h.1.mlp", leave, lambda x, *how: enter(leave(x, *how), *how))},
        "no sum of gradients": {"enter_parts": at("h.1.attn", enter, lambda x, *_: x)},
        "bias of each rank": {"leave_parts": at("h.1.mlp", leave, with_bias)},
        "vocabulary": {},
        "norm": {},
    }
    if framework != "pytorch":  # no fault of core or of the table's
        faults = {name: methods for name, methods in faults.items() if name in ("no fault", "a sum too many")}
    found = {}
    for name, methods in faults.items():
        for method, wrong in methods.items():
            setattr(adapter, method, wrong)
        table = Shifted(**vars(TABLE)) if name == "vocabulary" else TABLE
        pair = Pair(framework, mesh, ADAMW, table=table)
        if name == "norm":
            partition = pair.parts.update.partition
            partition.sum_of_squares = lambda norms: sum_of_squares(adapter, norms)  # type: ignore[method-assign]
        found[name] = pair.gradients(0)
        pair.step(0)
        found[name] |= {f"after {name}": error for name, error in pair.after().items()}
        for method in methods:
            delattr(adapter, method)
    return found


def main(framework: str, report: Path) -> None:
    adapter = adapters.load(framework)
    wanted = sets(RANKS, tensor_size=2) + sets(RANKS, tensor_size=RANKS)
    world = adapter.init("cpu", threads=1, sets=wanted)
    meshes = {size: Mesh(world, tensor_size=size, process_set=adapter.process_set) for size in (2, RANKS)}
    found: dict[str, Any] = {str(size): trained(framework, mesh) for size, mesh in meshes.items()}
    found["planted"] = planted(framework, meshes[2])
    found["overflow"] = overflowed(framework, meshes[2]) if "fp16" in adapter.CAPABILITIES else None
    everyone = adapter.allgather_object(found, meshes[2].world, name="report")
    if world.rank == 0:
        report.write_text(json.dumps(everyone))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
