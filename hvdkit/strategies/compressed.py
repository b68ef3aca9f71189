"""Gradients averaged by a codec and a transport of hvdkit, outside the framework's compiled functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from hvdkit.core.strategy import PREFIX, Strategy
from hvdkit.core.tensors import Tensor
from hvdkit.recipe.schema import Optimizer
from hvdkit.strategies.reducer import Reducer


class Compressed(Strategy):
    """Averages gradients by a `Reducer` at each update."""

    linear = False
    name = "reducer"

    def __init__(self, reducer: Reducer) -> None:
        self._gradients, self.group = reducer, reducer.transport.data
        self._updates = 0

    def optimizer(self, settings: Optimizer) -> Optimizer:
        """Without clipping if the codec corrects momentum, because it then clips before it accumulates."""
        corrects = getattr(self._gradients.compression, "momentum_correction", False)
        return settings.model_copy(update={"clip_norm": None}) if corrects else settings

    def average(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over all ranks; gradients are averaged as one vector."""
        return self.session.unpack(self.trainable.outside(self._mean, self.session.pack(gradients)))

    def _mean(self, vector: Tensor) -> Tensor:
        scale = self.session.update.scale
        return self._gradients.packed(vector, self.session.shapes, None if scale is None else float(scale.get()))

    @contextmanager
    def peek(self) -> Iterator[None]:
        """A context in which averaging does not change the codec's state."""
        with self._gradients.peek():
            yield

    def begin_epoch(self, epoch: int) -> None:
        """Pass the epoch to the codec, whose ratio may depend on it."""
        self._gradients.epoch = epoch

    def end_step(self) -> None:
        """Count the update."""
        self._updates += 1

    @property
    def bytes_per_step(self) -> float:
        """Bytes per update that the transport has counted."""
        return self._gradients.transport.sent / max(1, self._updates)

    def state(self) -> dict[str, np.ndarray]:
        """The codec's state, each name with PREFIX; collective."""
        return _prefixed({"gradients": self._gradients.state()})

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load the codec's state; see `Reducer.load_state`."""
        self._gradients.load_state(parts_of(state).get("gradients", {}))


def _prefixed(parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{PREFIX}{part}.{name}": value for part, state in parts.items() for name, value in state.items()}


def parts_of(state: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The strategy's tensors in a checkpoint's state, by part."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, value in state.items():
        if key.startswith(PREFIX):
            part, _, name = key.removeprefix(PREFIX).partition(".")
            parts.setdefault(part, {})[name] = value
    return parts
