"""One rank of four that trains a GPT in stages, beside the whole model on the batches of all ranks:

    python tests/pipeline/rank.py FRAMEWORK REPORT.json CASE…

A case is a schedule with a number of stages or `in parts`, `few` steps of what is compiled soon, `planted`, or
`overflow`.
Before each of the `forced` steps both load one state. Each fault that is planted is to be seen in the gradients, or in
the weights after a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core.group import Mesh, sets
from hvdkit.core.pieces import Partition
from hvdkit.core.pipeline import Plan, divided
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.core.slices import pieces_of
from hvdkit.core.state import digest
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import AdamW, Lamb, Loss, Optimizer, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.tasks.gpt import GPT
from hvdkit.tasks.resnet import ResNet
from hvdkit.tasks.task import Architecture
from tests.tensor.rank import build_of, errors, far, most

STEPS, RANKS, SAMPLES, MICROBATCHES = 20, 4, 8, 4
TABLE = GPT("gpt", layers=1, heads=2, width=16, context=8, vocabulary=37)
ADAMW = AdamW(learning_rate=0.01, weight_decay=0.1, decay="weights", clip_norm=0.5)
# Rules of core, which one framework is enough for.
OTHERS: list[Optimizer] = [Sgd(learning_rate=0.1, momentum=0.9, clip_norm=0.5), Lamb(learning_rate=0.01, clip_norm=0.5)]
Arrays = dict[str, np.ndarray]


def batch(step: int, rank: int, table: Architecture = TABLE) -> Batch:
    """The samples of a rank of the data axis."""
    if isinstance(table, ResNet):
        random = np.random.default_rng([step, rank])
        return Batch(random.standard_normal((SAMPLES, 8, 8, 3)), random.integers(0, table.classes, SAMPLES))
    both = np.random.default_rng([step, rank]).integers(0, TABLE.vocabulary, (SAMPLES, TABLE.context + 1))
    return Batch(both[:, :-1].copy(), both[:, 1:].copy())


def recorded(session: Session) -> dict[str, Any]:
    """Variables with the gradients of this rank's parameters in the last update, before clipping."""
    ops, unscaled = session.adapter, session.update.unscaled
    found = {name: ops.variable(parameter) for name, parameter in session.trainable.parameters.items()}

    def record(gradients: Mapping[str, Any]) -> dict[str, Any]:
        of_loss = unscaled(gradients)
        for name, gradient in of_loss.items():
            ops.assign(found[name], gradient)
        return of_loss

    session.update.unscaled = record  # type: ignore[method-assign]
    return found


def _pairs(parts: list[list[Batch]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """The microbatches of all data ranks that go through the stages beside each other."""
    return [[(own.inputs, own.targets) for own in beside] for beside in zip(*parts, strict=True)]


class Pair:
    """A model in stages, and the whole one, of the same values everywhere."""

    def __init__(
        self,
        framework: str,
        mesh: Mesh,
        schedule: str,
        optimizer: Optimizer = ADAMW,
        precision: str = "fp64",
        recompute: bool = False,
        more: int = 1,
        table: Architecture | None = None,
        synchronized: bool = False,
    ) -> None:
        chunks = 2 if schedule == "interleaved" else 1
        kinds = {"dtype": PRECISIONS[precision].parameters, "compute_dtype": PRECISIONS[precision].compute}
        layers = mesh.pipeline.size * chunks + more  # stages of unequal length, if there are more
        self.table = table = replace(table or replace(TABLE, layers=layers), recompute=recompute, **kinds)
        adapter, loss, self.synchronized = adapters.load(framework), Loss(label_smoothing=0.1), synchronized
        build = build_of(framework, "resnet" if isinstance(table, ResNet) else "gpt")
        self.mesh, tables, plan, self.microbatches = mesh, [table], None, 1
        if mesh.pipeline.size > 1:
            axes: dict[str, Any] = {"pipeline": mesh.pipeline.size, "schedule": schedule, "chunks": chunks}
            if isinstance(table, GPT):
                axes["split"] = [*[1] * (mesh.pipeline.size * chunks - 1), 1 + more]
            parallel, self.microbatches = Parallel(microbatches=MICROBATCHES, **axes), MICROBATCHES
            plan = Plan(mesh, schedule, MICROBATCHES, chunks)
            numbers = range(mesh.pipeline.index, parallel.runs, parallel.pipeline)
            tables = [table.staged(parallel, number) for number in numbers]
        tensor = mesh.tensor if mesh.tensor.size > 1 else None
        tables, strategy = [replace(own, tensor=tensor) for own in tables], Dense(adapter, mesh.data, accumulate=2)
        models = [build(own) for own in tables]
        for model in models if synchronized else ():
            assert adapter.synchronize_batch_norms(model, mesh.data)
        pieces = {name: piece for own in tables for name, piece in pieces_of(own, mesh.tensor).items()}
        model = models if chunks > 1 else models[0]
        self.stages = Session(adapter, model, optimizer, loss, strategy, precision, pieces=pieces, plan=plan)
        adapter.seed(3)  # the same on all ranks
        self.whole = Session(adapter, build(table), optimizer, loss, Strategy(), precision)
        random = np.random.default_rng(7)  # other values everywhere, slots too, the same on all ranks
        self.start = {
            name: np.asarray(value + 0.1 * random.random(value.shape), value.dtype)
            for name, value in self.whole.state().items()
        }
        for session in (self.stages, self.whole):
            session.load_state(self.start)
        self.recorded = [recorded(session) for session in (self.stages, self.whole)]

    def step(self, number: int, batches: int = 1) -> dict[str, float]:
        """Errors of this stage's gradients and, on the last stage, of the loss."""
        numbers, data = range(number * batches, (number + 1) * batches), self.mesh.data
        loss = self.stages.train_step([batch(each, data.index, self.table) for each in numbers])
        every = [[batch(each, rank, self.table) for each in numbers] for rank in range(data.size)]
        parts = [[part for each in own for part in divided(each, self.microbatches)] for own in every]
        if self.synchronized:  # its statistics are those of the microbatches of all data ranks
            parts = [[Batch(*map(np.concatenate, zip(*beside, strict=True))) for beside in _pairs(parts)]]
        wanted = self.whole.train_step([part for own in parts for part in own])
        got, reference = (
            {name: self.stages.array(gradient) for name, gradient in gradients.items()} for gradients in self.recorded
        )
        pieces = self.stages.held().pieces
        found = errors(got, {name: pieces[name].of(reference) for name in got})
        if data.size == 1 and loss is not None:
            found["loss"] = abs(float(loss) / float(wanted) - 1)
        return found

    def after(self) -> dict[str, float]:
        return errors(self.stages.state(), self.whole.state())


def trained(framework: str, mesh: Mesh, schedule: str, few: bool = False) -> dict[str, Any]:
    """Errors of each of the forced steps, of others without a teacher unless there are `few`, and of evaluations; and
    whether state is read and loaded whole."""
    pair = Pair(framework, mesh, schedule, more=0 if few else 1)
    loaded = pair.stages.state()
    gradients, weights, free = [], [], []
    for number in range(STEPS):
        pair.stages.load_state(pair.whole.state())
        gradients.append(pair.step(number))
        weights.append(pair.after())
    recompute, others = "recompute" in adapters.load(framework).CAPABILITIES, OTHERS if framework == "pytorch" else []
    for optimizer in () if few else (ADAMW, *others):
        other = Pair(framework, mesh, schedule, optimizer, recompute=recompute)
        for number in range(4):
            other.step(number, 1 + number % 2)
        free.append(other.after())
    pair.stages.load_state(pair.whole.state())
    seen = batch(99, mesh.data.index)
    own = pair.stages.trainable.parameters
    return {
        "gradients": most(gradients),
        "weights": most(weights),
        "free": most([{name: error for name, error in each.items() if name in pair.whole.shapes} for each in free]),
        "evaluation": far(pair.stages.losses(seen), pair.whole.losses(seen)),
        "loaded": all(np.array_equal(loaded[name], pair.start[name]) for name in pair.start),
        "names": sorted(own),
        "digest": [digest(session.model_arrays()) for session in (pair.stages, pair.whole)],
        "bytes": [session.state_bytes() for session in (pair.stages, pair.whole)],
        "sent": pair.stages.bytes_per_step,
    }


def overflowed(framework: str, mesh: Mesh) -> list[str]:
    """What an infinite gradient on the last stage alone changes."""
    session = Pair(framework, mesh, "1f1b", Sgd(learning_rate=0.1), "fp16").stages
    before, ops = session.state(), session.adapter
    gradients = {name: ops.zeros_like(tensor) + 1 for name, tensor in session.trainable.parameters.items()}
    if mesh.after is None:
        gradients["transformer.ln_f.weight"] = gradients["transformer.ln_f.weight"] * np.inf
    session.update(gradients)
    after = session.state()
    return sorted(name for name in before if not np.array_equal(before[name], after[name]))


def planted(framework: str, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of gradients, and after a step, with each fault."""

    def dropped(session: Session) -> None:
        stage: Any = session.pipeline._chunks[0]  # type: ignore[union-attr]
        forward, calls = stage.forward, []

        def once_without_gradients(*inputs: Any) -> Any:
            passed: Any = forward(*inputs)
            calls.append(passed)
            if len(calls) == 2:
                backward = passed.backward
                passed.backward = lambda gradient: without(*backward(gradient))
            return passed

        def without(of_inputs: Any, gradients: Mapping[str, Any]) -> Any:
            return of_inputs, {name: gradient * 0 for name, gradient in gradients.items()}

        stage.forward = once_without_gradients

    def scaled(session: Session) -> None:
        pipeline: Any = session.pipeline
        send = pipeline._send
        pipeline._send = lambda pair, tensor, batch, name: send(
            pair, tensor * 2 if name == "activation.1" else tensor, batch, name
        )

    def swapped(session: Session) -> None:
        pipeline: Any = session.pipeline
        receive = pipeline._receive
        others = {"gradient.1": "gradient.2", "gradient.2": "gradient.1"}
        pipeline._receive = lambda pair, batch, name: receive(pair, batch, others.get(name, name))

    def untied(session: Session) -> None:
        session.pipeline.share = lambda sums: None  # type: ignore[union-attr, method-assign]

    def by_ranks(session: Session) -> None:
        end = session.step.end
        session.step.end = lambda count: end(count * mesh.pipeline.size)  # type: ignore[method-assign]

    def norm_of_a_stage(session: Session) -> None:
        partition: Any = session.update.partition
        partition.sum_of_squares = lambda norms: Partition.sum_of_squares(partition, norms)

    faults: dict[str, Callable[[Session], None]] = {
        "no fault": lambda session: None,
        "a microbatch dropped": dropped,
        "gradients of another microbatch": swapped,
        "an activation scaled twice": scaled,
        "tied weights not summed": untied,
        "divided by ranks": by_ranks,
        "norm over one axis": norm_of_a_stage,
    }
    found = {}
    for name, plant in faults.items():
        pair = Pair(framework, mesh, "gpipe")
        plant(pair.stages)
        found[name] = pair.step(0) | {f"after {name}": error for name, error in pair.after().items()}
    return found


def main(framework: str, report: Path, *cases: str) -> None:
    adapter = adapters.load(framework)
    wanted = [*sets(RANKS, 2), *sets(RANKS, RANKS), *sets(RANKS, 2, 2)]
    world = adapter.init("cpu", threads=1, sets=list(dict.fromkeys(wanted)))
    meshes = {f"{size}": Mesh(world, size, process_set=adapter.process_set) for size in (2, RANKS)}
    meshes["in parts"] = Mesh(world, 2, 2, adapter.process_set)
    found: dict[str, Any] = {}
    for case in cases:
        schedule, _, mesh = case.partition(" ")
        if case == "planted":
            found[case] = planted(framework, meshes["2"])
        elif case == "overflow":
            found[case] = overflowed(framework, meshes["2"]) if "fp16" in adapter.CAPABILITIES else None
        elif case == "few":
            found[case] = trained(framework, meshes["in parts"], "1f1b", few=True)
        else:
            found[case] = trained(framework, meshes[mesh], schedule)
    everyone = adapter.allgather_object(found, meshes["2"].world, name="report")
    if world.rank == 0:
        report.write_text(json.dumps(everyone))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
