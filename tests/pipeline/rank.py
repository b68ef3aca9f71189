"""One rank of four that trains a GPT in stages, beside the whole model on the batches of all ranks:

    python tests/pipeline/rank.py FRAMEWORK REPORT.json CASE…

A case is a schedule with a number of stages or `in parts`, `few` steps of what is compiled soon, shares of the
optimizer's state, `counted`, `planted`, `overflow`, `dropout`, or `drifted`; for eight ranks `THREE_AXES`.
Before each of the `forced` steps both load one state. Each fault that is planted is to be seen in the gradients, or in
the weights after a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core import pipeline as of_core
from hvdkit.core.group import Mesh, sets
from hvdkit.core.pieces import Partition
from hvdkit.core.pipeline import PipelinePlan, divided
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.core.slices import pieces_of
from hvdkit.core.state import digest
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.errors import RunError
from hvdkit.handlers.rank_checks import check_ranks
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import AdamW, AverageWeights, Lamb, Loss, Optimizer, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.strategies.sharded import Sharded
from hvdkit.tasks.gpt import GPT
from hvdkit.tasks.parts import bounds
from hvdkit.tasks.resnet import ResNet
from hvdkit.tasks.task import Architecture
from hvdkit.worker.setup import seed_of
from tests.tensor.rank import build_of, errors, far, most

STEPS, RANKS, SAMPLES, MICROBATCHES = 20, 4, 8, 4
THREE_AXES = "two by two by two"  # on eight ranks
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
    """Variables with the gradients of this rank's pieces in the last update, before clipping."""
    ops, unscaled = session.adapter, session.update.unscaled
    found = session.update.partition.variables()

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

    build_of: Callable[..., Any] = staticmethod(build_of)

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
        shards: bool = False,
        loss: Loss | None = None,
    ) -> None:
        chunks = 2 if schedule == "interleaved" else 1
        kinds = {"dtype": PRECISIONS[precision].parameters, "compute_dtype": PRECISIONS[precision].compute}
        layers = mesh.pipeline.size * chunks + more  # stages of unequal length, if there are more
        self.table = table = replace(table or replace(TABLE, layers=layers), recompute=recompute, **kinds)
        adapter, loss, self.synchronized = adapters.load(framework), loss or Loss(label_smoothing=0.1), synchronized
        build = self.build_of(framework, "resnet" if isinstance(table, ResNet) else "gpt")
        self.mesh, tables, plan, self.microbatches = mesh, [table], None, 1
        if mesh.pipeline.size > 1:
            axes: dict[str, Any] = {"pipeline": mesh.pipeline.size, "schedule": schedule, "chunks": chunks}
            if isinstance(table, GPT):
                axes["split"] = [*[1] * (mesh.pipeline.size * chunks - 1), 1 + more]
            parallel, self.microbatches = Parallel(microbatches=MICROBATCHES, **axes), MICROBATCHES
            plan = PipelinePlan(mesh, schedule, MICROBATCHES, chunks)
            numbers = range(mesh.pipeline.index, parallel.runs, parallel.pipeline)
            tables = [table.staged(parallel, number) for number in numbers]
        tensor = mesh.tensor if mesh.tensor.size > 1 else None
        kind: Callable[..., Strategy] = partial(Sharded, frees=False, most_bytes=8000) if shards else Dense
        tables, strategy = [replace(own, tensor=tensor) for own in tables], kind(adapter, mesh.data, accumulate=2)
        models = [build(own) for own in tables]
        for model in models if synchronized else ():
            assert adapter.synchronize_batch_norms(model, mesh.data)
        pieces = {name: piece for own in tables for name, piece in pieces_of(own, mesh.tensor).items()}
        model = models if chunks > 1 else models[0]
        self.stages = Session(adapter, model, optimizer, loss, strategy, precision, pieces=pieces, plan=plan)
        adapter.seed(3)  # the same on all ranks
        self.whole = Session(adapter, build(table), optimizer, loss, Strategy(), precision)
        for session in (self.stages, self.whole) if shards else ():
            session.keep_average(AverageWeights(decay=0.5))
        random = np.random.default_rng(7)  # other values everywhere, slots too, the same on all ranks
        self.start = {
            name: np.asarray(value + 0.1 * random.random(value.shape), value.dtype)
            for name, value in self.whole.state().items()
        }
        for session in (self.stages, self.whole):
            session.load_state(self.start)
        self.recorded = [recorded(session) for session in (self.stages, self.whole)]
        self.shards = shards

    def step(self, number: int, batches: int = 1) -> dict[str, float]:
        """Errors of this stage's gradients and, on the last stage, of the loss."""
        numbers, data = range(number * batches, (number + 1) * batches), self.mesh.data
        loss = self.stages.train_step([batch(each, data.index, self.table) for each in numbers])
        every = [[batch(each, rank, self.table) for each in numbers] for rank in range(data.size)]
        parts = [[part for each in own for part in divided(each, self.microbatches)] for own in every]
        if self.synchronized:  # its statistics are those of the microbatches of all data ranks
            parts = [[Batch(*map(np.concatenate, zip(*beside, strict=True))) for beside in _pairs(parts)]]
        wanted = self.whole.train_step([part for own in parts for part in own])
        gradients, reference = self.recorded[0], self._arrays(self.recorded[1])
        if self.shards:  # of the whole model
            found = errors(self._arrays(dict(self.stages.update.partition.gather(gradients))), reference)
        else:
            pieces, own = self.stages.held().pieces, self._arrays(gradients)
            # In the layout of checkpoints, which pieces of TensorFlow's convolutions, all whole, do not have.
            found = errors(own, {name: pieces[name].of(reference).reshape(own[name].shape) for name in own})
        if data.size == 1 and loss is not None:
            found["loss"] = far(self.stages.adapter.to_numpy(loss), self.whole.adapter.to_numpy(wanted))
        return found

    def _arrays(self, tensors: Mapping[str, Any]) -> Arrays:
        return {name: self.stages.array(tensor) for name, tensor in tensors.items()}

    def after(self) -> dict[str, float]:
        return errors(self.stages.state(), self.whole.state())


def trained(framework: str, mesh: Mesh, schedule: str, few: bool = False, shards: bool = False) -> dict[str, Any]:
    """Errors of each of the forced steps, of others without a teacher unless there are `few`, and of evaluations; and
    whether state is read and loaded whole. With `shards` of the optimizer's state, and an average of the weights."""
    pair = Pair(framework, mesh, schedule, more=0 if few else 1, shards=shards)
    loaded = pair.stages.state()
    gradients, weights, free = [], [], []
    for number in range(STEPS):
        pair.stages.load_state(pair.whole.state())
        gradients.append(pair.step(number))
        weights.append(pair.after())
    recompute, others = "recompute" in adapters.load(framework).CAPABILITIES, OTHERS if framework == "pytorch" else []
    for optimizer in () if few else (ADAMW, *others):
        other = Pair(framework, mesh, schedule, optimizer, recompute=recompute, shards=shards)
        for number in range(4):
            other.step(number, 1 + number % 2)
        free.append(other.after())
    pair.stages.load_state(pair.whole.state())
    seen, evaluated = batch(99, mesh.data.index), evaluated_by(pair.stages)
    averaged = 0.0
    if shards:
        with pair.stages.averaged(), pair.whole.averaged():
            averaged = far(pair.stages.losses(seen), pair.whole.losses(seen))
    own = pair.stages.trainable.parameters
    return {
        "gradients": most(gradients),
        "weights": most(weights),
        "free": most([{name: error for name, error in each.items() if name in pair.whole.shapes} for each in free]),
        "evaluation": max(averaged, far(pair.stages.losses(seen), pair.whole.losses(seen))),
        "evaluated": sorted(evaluated),
        "loaded": all(np.array_equal(loaded[name], pair.start[name]) for name in pair.start),
        "names": sorted(own),
        "digest": [digest(session.model_arrays()) for session in (pair.stages, pair.whole)],
        "bytes": [session.state_bytes() for session in (pair.stages, pair.whole)],
        "sent": pair.stages.bytes_per_step,
    }


def evaluated_by(session: Session) -> set[int]:
    """How many samples its chunks take at once in evaluations from now on."""
    sizes: set[int] = set()

    def noted(evaluate: Callable[..., Any], inputs: Any, targets: Any) -> Any:
        sizes.add(len(inputs))
        return evaluate(inputs, targets)

    for stage in session.pipeline._chunks if session.pipeline else ():
        stage.evaluate = partial(noted, stage.evaluate)  # type: ignore[method-assign]
    return sizes


def counted(framework: str, mesh: Mesh) -> dict[str, float]:
    """Errors of steps with a loss that is a sum over a count, which is another one in each microbatch."""
    found = []
    for schedule in ("gpipe", "1f1b"):
        pair = Pair(framework, mesh, schedule, loss=Loss(ignored_label=3, class_weights=list(range(1, 38))))
        found += [pair.step(number, 1 + number % 2) | pair.after() for number in range(3)]
    return most(found)


def on_three_axes(framework: str, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of gradients and state in forced steps, and of the weights after as many without a teacher."""
    pair, forced = Pair(framework, mesh, "1f1b"), []
    for number in range(STEPS):
        pair.stages.load_state(pair.whole.state())
        forced.append(pair.step(number) | {f"after {name}": error for name, error in pair.after().items()})
    for session in (pair.stages, pair.whole):
        session.load_state(pair.start)
    for number in range(STEPS):
        pair.step(number)
    return {
        "forced": most(forced),
        "free": {name: error for name, error in pair.after().items() if name in pair.whole.shapes},
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

    def without_flush(session: Session) -> None:
        add, ops = session.step.add, session.adapter

        def and_update(gradients: Mapping[str, Any]) -> None:
            add(gradients)
            if mesh.after is None:
                for name, parameter in session.trainable.parameters.items():
                    ops.assign(parameter, parameter - gradients[name] * 0.1)

        session.step.add = and_update  # type: ignore[method-assign]

    faults: dict[str, Callable[[Session], None]] = {
        "no fault": lambda session: None,
        "a microbatch dropped": dropped,
        "gradients of another microbatch": swapped,
        "an activation scaled twice": scaled,
        "tied weights not summed": untied,
        "divided by ranks": by_ranks,
        "norm over one axis": norm_of_a_stage,
        "stale weights": without_flush,
    }
    found = {}
    for name, plant in faults.items():
        pair = Pair(framework, mesh, "1f1b" if name == "stale weights" else "gpipe")
        plant(pair.stages)
        found[name] = pair.step(0) | {f"after {name}": error for name, error in pair.after().items()}
    return found


def shares_with_faults(framework: str, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of shares in parts of layers, with norms for clipping that are wrong."""
    found = {}
    for name in ("no fault", "norm of a share", "whole ones twice"):
        pair = Pair(framework, mesh, "", shards=True)
        partition: Any = pair.stages.update.partition
        if name == "norm of a share":
            partition._summed = lambda numbers, group: numbers
        elif name == "whole ones twice":
            partition.sum_of_squares = partial(Partition.sum_of_squares, partition)
        found[name] = pair.step(0) | {f"after {name}": error for name, error in pair.after().items()}
    return found


class Seeded:
    """All that `seed_of` reads of a recipe."""

    seed = 11


class Dropped(Pair):
    """Models with dropout after each MLP, in PyTorch. The whole one draws for each stage, and for the samples of each
    rank of the data axis, what the ranks draw that have this stage and read these samples."""

    def __init__(self, mesh: Mesh, schedule: str, stream: int | None = None, **more: Any) -> None:
        super().__init__("pytorch", mesh, schedule, **more)
        import torch

        stages, data = mesh.pipeline.size, mesh.data.size
        self._states: dict[tuple[int, int], Any] = {}
        for place in ((rank, stage) for rank in range(data) for stage in range(stages)):
            torch.manual_seed(seed_of(Seeded, place[1] * data + place[0]))  # type: ignore[arg-type]
            self._states[place] = torch.get_rng_state()
        for session in (self.stages, self.whole):
            for block in session.trainable.model.transformer["h"]:
                block.mlp.register_forward_hook(_dropped)
        blocks, self._passed = list(self.whole.trainable.model.transformer["h"]), 0
        for stage in range(stages):
            first, stop = bounds(len(blocks), stage, stages)
            blocks[first].register_forward_pre_hook(partial(self._enter, stage))
            blocks[stop - 1].register_forward_hook(partial(self._leave, stage))
        torch.manual_seed(seed_of(Seeded, mesh.stream if stream is None else stream))  # type: ignore[arg-type]

    def _enter(self, stage: int, *_: Any) -> None:
        import torch

        if stage == 0:
            self._ours, self._passed = torch.get_rng_state(), self._passed + 1
        self._rank = (self._passed - 1) // MICROBATCHES % self.mesh.data.size
        torch.set_rng_state(self._states[self._rank, stage])

    def _leave(self, stage: int, *_: Any) -> None:
        import torch

        self._states[self._rank, stage] = torch.get_rng_state()
        if stage == self.mesh.pipeline.size - 1:
            torch.set_rng_state(self._ours)


def _dropped(layer: Any, inputs: Any, outputs: Any) -> Any:
    from torch.nn import functional

    return functional.dropout(outputs, 0.25, layer.training)


def swapped_order(batch: Batch, parts: int) -> Iterator[Batch]:
    first, second, *rest = divided(batch, parts)
    yield from (second, first, *rest)


def dropped_out(mesh: Mesh, in_parts: Mesh) -> dict[str, dict[str, float]]:
    """Errors of gradients in two steps with dropout, and with faults."""

    def steps(pair: Pair) -> dict[str, float]:
        return most([pair.step(number) for number in range(2)])

    found = {
        "gpipe": steps(Dropped(mesh, "gpipe")),
        "1f1b": steps(Dropped(mesh, "1f1b", recompute=True)),
        "in parts": steps(Dropped(in_parts, "1f1b")),
        "other masks in each part": steps(Dropped(in_parts, "1f1b", stream=in_parts.topology.rank)),
    }
    of_core.divided = swapped_order  # type: ignore[attr-defined]
    found["another order"] = steps(Dropped(mesh, "1f1b"))
    found["another order without dropout"] = steps(Pair("pytorch", mesh, "1f1b"))
    of_core.divided = divided  # type: ignore[attr-defined]
    return found


class Masked(Pair):
    """Stages with dropout after each block, in the frameworks whose generators have no state that can be read."""

    @staticmethod
    def build_of(framework: str, script: str = "gpt") -> Any:
        build = build_of(framework, script)
        names = (build.__init__ if isinstance(build, type) else build).__globals__
        names["Block"] = globals()[f"_{framework}_dropping"](names["Block"])
        return build

    def __init__(self, framework: str, mesh: Mesh, schedule: str, stream: int | None = None) -> None:
        super().__init__(framework, mesh, schedule)
        self.stages.adapter.seed(seed_of(Seeded, mesh.stream if stream is None else stream))  # type: ignore[arg-type]

    def gradients(self) -> Arrays:
        """Those of the second of two steps."""
        for number in range(2):
            self.stages.train_step([batch(number, self.mesh.data.index)])
        return self._arrays(self.recorded[0])

    def outputs(self) -> str:
        """A digest of what the first stage computes of the same samples on all ranks, in training."""
        stage: Any = self.stages.pipeline._chunks[0]  # type: ignore[union-attr]
        inputs, _ = self.stages.trainable.inputs(batch(0, 0))
        return digest([("outputs", self.stages.array(stage.forward(inputs, None, False).outputs))])


def _mxnet_dropping(block: Any) -> Any:
    class Block(block):  # type: ignore[misc]
        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return F.Dropout(super().hybrid_forward(F, x), p=0.25)

    return Block


def _tensorflow_dropping(block: Any) -> Any:
    import tensorflow as tf

    class Block(block):  # type: ignore[misc]
        def compute(self, x: Any) -> Any:
            return tf.nn.dropout(super().compute(x), 0.25)

    return Block


def _keras_dropping(block: Any) -> Any:
    import keras

    class Block(block):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.drop = keras.layers.Dropout(0.25, dtype=given[-1])

        def compute(self, x: Any) -> Any:
            return self.drop(super().compute(x), training=True)

    return Block


def masked(framework: str, mesh: Mesh, in_parts: Mesh) -> dict[str, Any]:
    """Errors of gradients with dropout against those of the schedule `gpipe`, and what first stages compute."""
    wanted = Masked(framework, mesh, "gpipe").gradients()
    found: dict[str, Any] = {"1f1b": errors(Masked(framework, mesh, "1f1b").gradients(), wanted)}
    of_core.divided = swapped_order  # type: ignore[attr-defined]
    found["another order"] = errors(Masked(framework, mesh, "1f1b").gradients(), wanted)
    of_core.divided = divided  # type: ignore[attr-defined]
    wanted = Masked(framework, in_parts, "gpipe").gradients()
    found["1f1b in parts"] = errors(Masked(framework, in_parts, "1f1b").gradients(), wanted)
    for name, on, stream in (
        ("data", mesh, None),
        ("parts", in_parts, None),
        ("wrong", in_parts, in_parts.topology.rank),
    ):
        pair = Masked(framework, on, "1f1b", stream)
        found[name] = pair.outputs() if on.before is None else None
    return found


def drifted(framework: str, mesh: Mesh) -> list[str]:
    """What `check_ranks` says of ranks in step, and once a weight on the last rank is another."""
    session, told = Pair(framework, mesh, "1f1b").stages, list[str]()
    for number in range(2):
        if number and mesh.topology.rank == RANKS - 1:
            own = session.trainable.parameters["transformer.ln_f.weight"]
            session.adapter.assign(own, own * 1.001)
        try:
            check_ranks(session, mesh, number)
            told.append("")
        except RunError as error:
            told.append(str(error))
    return told


def main(framework: str, report: Path, *cases: str) -> None:
    adapter = adapters.load(framework)
    sizes = {"2": (2, 1), "4": (4, 1), "in parts": (2, 2), "in data": (1, 2)}
    if cases == (THREE_AXES,):
        sizes = {THREE_AXES: (2, 2)}
    ranks = int(os.environ["HOROVOD_SIZE"])
    wanted = dict.fromkeys(group for axes in sizes.values() for group in sets(ranks, *axes))
    world = adapter.init("cpu", threads=1, sets=list(wanted))
    meshes = {name: Mesh(world, *axes, adapter.process_set) for name, axes in sizes.items()}
    found: dict[str, Any] = {}
    for case in cases:
        schedule, _, mesh = case.partition(" ")
        if case == THREE_AXES:
            found[case] = on_three_axes(framework, meshes[case])
        elif case == "planted":
            found[case] = planted(framework, meshes["2"])
        elif case == "counted":
            found[case] = {name: counted(framework, meshes[name]) for name in ("2", "4")}
        elif case == "overflow":
            found[case] = overflowed(framework, meshes["2"]) if "fp16" in adapter.CAPABILITIES else None
        elif case == "few":
            found[case] = trained(framework, meshes["in parts"], "1f1b", few=True)
        elif case == "shares of stages":
            found[case] = trained(framework, meshes["2"], "1f1b", shards=True)
        elif case == "shares of parts":
            found[case] = trained(framework, meshes["in data"], "", shards=True)
        elif case == "shares with faults":
            found[case] = shares_with_faults(framework, meshes["in data"])
        elif case == "dropout":
            both = meshes["2"], meshes["in parts"]
            found[case] = dropped_out(*both) if framework == "pytorch" else masked(framework, *both)
        elif case == "drifted":
            found[case] = {name: drifted(framework, meshes[name]) for name in ("2", "in parts")}
        else:
            found[case] = trained(framework, meshes[mesh], schedule)
    everyone = adapter.allgather_object(found, next(iter(meshes.values())).world, name="report")
    if world.rank == 0:
        report.write_text(json.dumps(everyone))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
