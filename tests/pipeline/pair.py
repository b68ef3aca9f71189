"""A GPT or a ResNet in stages, beside the whole model on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core.group import Mesh
from hvdkit.core.pipeline import PipelinePlan, divided
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.core.slices import pieces_of
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import AdamW, AverageWeights, Lamb, Loss, Optimizer, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.strategies.sharded import Sharded
from hvdkit.tasks.gpt import GPT
from hvdkit.tasks.resnet import ResNet
from hvdkit.tasks.task import Architecture
from tests.tensor.rank import build_of, errors, far

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
            pieces, own = self.stages.held().pieces, self._as_they_are(gradients)
            reference = self._as_they_are(self.recorded[1])
            found = errors(own, {name: pieces[name].of(reference) for name in own})
        if data.size == 1 and loss is not None:
            found["loss"] = far(self.stages.adapter.to_numpy(loss), self.whole.adapter.to_numpy(wanted))
        return found

    def _arrays(self, tensors: Mapping[str, Any]) -> Arrays:
        return {name: self.stages.array(tensor) for name, tensor in tensors.items()}

    def _as_they_are(self, tensors: Mapping[str, Any]) -> Arrays:
        """In the framework's own layout."""
        return {name: self.stages.adapter.to_numpy(tensor) for name, tensor in tensors.items()}

    def after(self) -> dict[str, float]:
        return errors(self.stages.state(), self.whole.state())
