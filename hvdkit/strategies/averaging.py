"""What ranks say to each other in training: means of gradients at each update, or of weights now and then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import Adapter, Session
from hvdkit.core.state import parameters_of
from hvdkit.core.topology import Topology
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Optimizer, Recipe
from hvdkit.strategies.compressed import Reducer
from hvdkit.strategies.transports import TRANSPORTS, ring_bytes

Tensor = Any
PREFIX = "communication."  # of its part in a checkpoint's state


class Communication:
    """How the recipe's ranks come to their mean, and all that is to be kept of it.

    The hooks `begin_epoch`, `begin_step` and `end_step` are called by the loop, on all ranks alike. Local SGD (Stich
    2019): from `sync.start` on ranks update by their own gradients, and every `sync.every` updates their weights become
    their mean. `settle` ends such a round before its time, so that there is one model to evaluate or keep.
    """

    def __init__(self, adapter: Adapter, topology: Topology, recipe: Recipe) -> None:
        self._adapter, self._topology, self._recipe = adapter, topology, recipe
        self._transport = TRANSPORTS[recipe.allreduce](adapter, topology, "gradients")
        optimizer = recipe.optimizer
        momentum = float(getattr(optimizer, "momentum", 0.0))
        self._gradients = Reducer(self._transport, recipe.compression, recipe.seed, momentum, optimizer.clip_norm)
        self._differences = Reducer(self._transport, recipe.compression, recipe.seed)
        self._session: Session = None
        self._alone = False  # whether the update at hand is by the rank's own gradients
        self._taken = 0  # updates since ranks have met
        self._updates, self._plain_bytes = 0, 0.0
        # As one vector each, as `Adapter.weights` has them: the weights when they met, the outer optimizer's velocity.
        self._anchor: Tensor = None
        self._velocity: Tensor = None
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the weights by name

    @property
    def averaging(self) -> Communication | None:
        """What an adapter averages by; None for Horovod's own reduction, which overlaps where that helps."""
        recipe = self._recipe
        plain = recipe.compression.method in ("none", "fp16") and recipe.sync is None and recipe.allreduce == "ring"
        return None if plain else self

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer without what compression does in its place."""
        corrects = getattr(self._recipe.compression, "momentum_correction", False)
        return self._recipe.optimizer.model_copy(update={"clip_norm": None}) if corrects else self._recipe.optimizer

    def bind(self, session: Session, parameters: int) -> None:
        """The session whose weights are meant, with so many parameters."""
        self._session = session
        half = self._recipe.compression.method == "fp16"
        itemsize = 2 if half else np.dtype(PRECISIONS[self._recipe.precision].parameters).itemsize
        self._plain_bytes = ring_bytes(parameters * itemsize, self._topology.size)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a rank has sent for an update, on average over all of this process."""
        if self.averaging is None:
            return self._plain_bytes
        return self._transport.sent / max(1, self._updates)

    def __call__(self, gradients: Mapping[str, Tensor], scale: float | None = None) -> Mapping[str, Tensor]:
        """As `hvdkit.core.seam.Averaging`."""
        return gradients if self._alone else self._gradients(gradients, scale)

    def packed(self, vector: Tensor, shapes: Mapping[str, tuple[int, ...]], scale: float | None = None) -> Tensor:
        """As `hvdkit.core.seam.Averaging`."""
        return vector if self._alone else self._gradients.packed(vector, shapes, scale)

    @contextmanager
    def peek(self) -> Iterator[None]:
        """As `hvdkit.core.seam.Averaging`."""
        with self._gradients.peek():
            yield

    def begin_epoch(self, epoch: int) -> None:
        """Epochs count from 0."""
        self._gradients.epoch = self._differences.epoch = epoch

    def begin_step(self, step: int, steps_per_epoch: int) -> None:
        """Before the update behind which `step` others are."""
        sync = self._recipe.sync
        self._alone = sync is not None and step >= round(sync.start * steps_per_epoch)
        if self._alone and self._anchor is None:
            self._anchor = self._adapter.weights(self._session)
            state = parameters_of(self._adapter.state(self._session))
            self._shapes = {name: state[name].shape for name in sorted(state)}
            self._gradients.reset()

    def end_step(self) -> None:
        """Behind an update: ranks meet where it is time to."""
        self._updates += 1
        if not self._alone:
            return
        self._taken += 1
        assert self._recipe.sync
        if self._taken >= self._recipe.sync.every:
            self.synchronize()

    @property
    def diverged(self) -> bool:
        """Whether ranks have weights of their own, as they have taken updates alone since they met."""
        return self._taken > 0

    def synchronize(self) -> None:
        """End a round: one model on all ranks; collective. Nothing where there is one already.

        The mean difference since the last meeting is taken from the weights then, by SGD with Nesterov's momentum where
        the recipe has an outer optimizer: v = μ v + Δ, w = w - η (Δ + μ v) (Douillard et al. 2023, algorithm 1).
        """
        if not self.diverged:
            return
        assert self._anchor is not None and self._recipe.sync
        step = self._differences.packed(self._anchor - self._adapter.weights(self._session), self._shapes)
        outer = self._recipe.sync.outer
        if outer is not None:
            self._velocity = step if self._velocity is None else outer.momentum * self._velocity + step
            step = outer.learning_rate * (step + outer.momentum * self._velocity)
        self._anchor = self._anchor - step
        self._adapter.set_weights(self._session, self._anchor)
        if trace_events.recording():
            self._adapter.synchronize()
            trace_events.mark(trace_events.REDUCED)
        self._taken = 0

    def settle(self) -> None:
        """As `synchronize`, and optimizers' slots become their mean too: what goes on from here needs no rank's own."""
        self.synchronize()
        if self._anchor is None or self._topology.size == 1:
            return
        adapter = self._adapter
        state = adapter.state(self._session)
        slots = {name: value for name, value in state.items() if name.startswith("optimizer.") and name.count(".") > 1}
        means = adapter.allreduce([adapter.from_numpy(value) for value in slots.values()], name="optimizer_slots")
        merged = {name: adapter.to_numpy(mean) for name, mean in zip(slots, means, strict=True)}
        adapter.load_state(self._session, state | merged)

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it, each name with PREFIX; collective, when ranks have one model."""
        parts = {"gradients": self._gradients.state(), "differences": self._differences.state(), "outer": {}}
        if self._velocity is not None:
            held = self._adapter.tensors.part(self._velocity, list(self._shapes.values()))
            named = zip(self._shapes, held, strict=True)
            parts["outer"] = {f"momentum.{name}": self._adapter.to_numpy(each) for name, each in named}
        return {f"{PREFIX}{part}.{name}": value for part, state in parts.items() for name, value in state.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state`, on any number of ranks (`Reducer.load_state`)."""
        parts: dict[str, dict[str, np.ndarray]] = {"gradients": {}, "differences": {}, "outer": {}}
        for key, value in state.items():
            if key.startswith(PREFIX):
                part, _, name = key.removeprefix(PREFIX).partition(".")
                parts[part][name] = value
        self._gradients.load_state(parts["gradients"])
        self._differences.load_state(parts["differences"])
        held = {name.removeprefix("momentum."): parts["outer"][name] for name in sorted(parts["outer"])}
        if held:
            self._shapes = {name: value.shape for name, value in held.items()}
            self._velocity = self._adapter.from_numpy(np.concatenate([value.reshape(-1) for value in held.values()]))


def without_communication(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What of a checkpoint's state is the adapter's."""
    return {name: value for name, value in state.items() if not name.startswith(PREFIX)}


def check_alike(adapter: Adapter, topology: Topology, settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings, by dotted key; collective.

    Raises RequestError, the same on every rank, naming each key that differs and the ranks' values.
    """
    if topology.size == 1:
        return
    everyone = adapter.allgather_object(dict(settings), name="settings")
    faults = []
    for key in sorted({key for each in everyone for key in each}):
        values = [each.get(key, "nothing") for each in everyone]
        apart = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if apart is not None:
            faults.append(
                f"{key}: expected the same on all ranks, got {values[0]} on rank 0 and {values[apart]} on rank {apart}"
            )
    if faults:
        raise RequestError("\n".join(faults))
