"""What the tests of sharded training share: models whose memory is divided, and ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdkit.core.group import Mesh, Topology
from hvdkit.core.pieces import ROOT_BLOCK
from hvdkit.core.session import Session
from hvdkit.core.trainable import Block, Divisible, Hooks, Uses
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import Loss, Optimizer
from hvdkit.strategies.dense import Dense
from hvdkit.strategies.sharded import Sharded
from hvdkit.strategies.sharded_parameters import ShardedParameters
from tests.contract.grown import worst
from tests.crowd import together
from tests.local_adapter import Linear, TrainableModel

STEPS, FEATURES, CLASSES = 8, 5, 3


class InBlocks(TrainableModel, Divisible):
    """A linear model in two blocks, the bias being the root. Parameters that are not there are NaN."""

    def blocks(self) -> dict[str, list[str]]:
        return {ROOT_BLOCK: ["fc.bias"], "fc": ["fc.weight"]}

    def divide(self, blocks: Any, uses: Uses | None = None) -> dict[str, Block]:
        assert uses
        self.uses, found = uses, {}
        for block, ((name,), size) in blocks.items():
            found[block] = Memory(size)
            parameter = self.parameters[name]
            self.parameters[name] = found[block].vector[: parameter.size].reshape(parameter.shape)
        return found

    def backward(self, inputs: Any, targets: Any, scale: Any) -> Any:
        for phase in ("forward", "backward"):
            self.uses.begin(ROOT_BLOCK, phase)
            self.uses.begin("fc", phase)
            found = super().backward(inputs, targets, scale)
            self.uses.end("fc", phase)
            self.uses.end(ROOT_BLOCK, phase)
        return found

    def predict(self, inputs: Any) -> Any:
        for block in (ROOT_BLOCK, "fc"):
            self.uses.begin(block, "prediction")
        found = super().predict(inputs)
        for block in ("fc", ROOT_BLOCK):
            self.uses.end(block, "prediction")
        return found


class Memory:
    def __init__(self, size: int) -> None:
        self.vector = np.full(size, np.nan)

    def allocate(self) -> None:
        assert np.isnan(self.vector).all(), "it was there already"

    def free(self) -> None:
        self.vector[...] = np.nan


class BlockwiseAdapter:
    """A rank's adapter whose models are `InBlocks`."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def bind(self, model: Any, loss: Any, precision: str) -> InBlocks:
        return InBlocks(model, loss)


class InVectors(TrainableModel, Hooks):
    """A linear model whose gradients are parts of vectors."""

    def on_ready(self, ready: Any) -> None:
        raise NotImplementedError

    def join_gradients(self, groups: Any) -> InVectors:
        self.vectors, self.parts = [], {}
        for names, size in groups:
            self.vectors.append(np.zeros(size))
            start = 0
            for name in names:
                parameter = self.parameters[name]
                self.parts[name] = self.vectors[-1][start : start + parameter.size].reshape(parameter.shape)
                start += parameter.size
        return self

    def holds(self, gradients: Any) -> bool:
        return all(gradients[name] is part for name, part in self.parts.items())

    def backward(self, inputs: Any, targets: Any, scale: Any) -> Any:
        logits, loss, gradients = super().backward(inputs, targets, scale)
        for name, gradient in gradients.items():
            self.parts[name][...] = gradient
        return logits, loss, self.parts


def staged(adapter: Any, topology: Topology, stage: str, **more: Any) -> Any:
    """The strategy of a stage."""
    data = Mesh(topology).data
    if stage == "none":
        return Dense(adapter, data)
    if stage == "parameters":
        more.pop("most_bytes", None)
        return ShardedParameters(adapter, data, **more)
    return Sharded(adapter, data, stage == "gradients", **more)


def session_of(adapter: Any, optimizer: Optimizer, strategy: Any) -> Any:
    if isinstance(strategy, ShardedParameters):
        adapter = BlockwiseAdapter(adapter)
    session = Session(adapter, Linear(FEATURES, CLASSES), optimizer, Loss(), strategy)
    random = np.random.default_rng(1)
    session.load_state(
        {"fc.weight": random.standard_normal((CLASSES, FEATURES)), "fc.bias": random.standard_normal(CLASSES)}
    )
    return session


def batch(step: int, rank: int) -> Batch:
    random = np.random.default_rng((step, rank))
    return Batch(random.standard_normal((4, FEATURES)), random.integers(0, CLASSES, 4))


def on_ranks(ranks: int, optimizer: Optimizer, strategy: Callable[[Any, Topology], Any]) -> list[dict[str, np.ndarray]]:
    """Rank 0's state after each step."""
    steps = STEPS if ranks < 10 else 2

    def train(adapter: Any, topology: Topology) -> list[dict[str, np.ndarray]]:
        session = session_of(adapter, optimizer, strategy(adapter, topology))
        states = []
        for step in range(steps):
            parts = [batch(10 * step + part, topology.rank) for part in range(1 + step % 2)]
            session.train_step(parts)
            states.append(session.state())
        return states

    found: list[list[dict[str, np.ndarray]]] = together(ranks, train)
    assert all(worst(other[-1], found[0][-1]) == 0 for other in found)
    return found[0]
