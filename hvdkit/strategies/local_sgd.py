"""Local SGD (Stich 2019): ranks update by their own gradients and average their weights periodically."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.state import AVERAGE, slot_name
from hvdkit.core.strategy import PREFIX
from hvdkit.core.tensors import Tensor
from hvdkit.recipe.communication import Sync
from hvdkit.strategies.compressed import Compressed, parts_of
from hvdkit.strategies.reducer import Reducer


class LocalSgd(Compressed):
    """From epoch `sync.start` on, ranks update independently and average their weights every `sync.every` updates.

    With an outer optimizer this is DiLoCo (Douillard et al. 2023). `synchronize` may end a round early, so that there
    is one model to evaluate or save.
    """

    def __init__(self, gradients: Reducer, differences: Reducer, sync: Sync) -> None:
        super().__init__(gradients)
        self._sync, self._differences = sync, differences
        self._adapter = differences.transport.adapter
        self._local = False  # whether the current update uses only the rank's own gradients
        self._taken = 0  # updates since the weights were averaged
        # The last common weights and the outer optimizer's velocity, each one vector as `Session.weights` returns.
        self._anchor: Tensor = None
        self._velocity: Tensor = None

    def _mean(self, vector: Tensor) -> Tensor:
        return vector if self._local else super()._mean(vector)

    def mean_count(self, count: Tensor) -> Tensor:
        """The mean over the group; of an update of this rank alone its own count."""
        return self.trainable.outside(self._mean_count, count)

    def _mean_count(self, count: Tensor) -> Tensor:
        return count if self._local else super().mean_count(count)

    def begin_epoch(self, epoch: int) -> None:
        """Pass the epoch to both codecs."""
        super().begin_epoch(epoch)
        self._differences.epoch = epoch

    def begin_step(self, step: int, steps_per_epoch: int) -> None:
        """Start local updates from `sync.start` on."""
        self._local = step >= round(self._sync.start * steps_per_epoch)
        if self._local and self._anchor is None:
            self._anchor = self.session.weights()
            self._gradients.reset()

    def end_step(self) -> None:
        """Count the update, and average the weights if `sync.every` updates have been made."""
        super().end_step()
        if self._local:
            self._taken += 1
            if self._taken >= self._sync.every:
                self.synchronize()

    @property
    def diverged(self) -> bool:
        """Whether there were local updates since the weights were averaged."""
        return self._taken > 0

    def synchronize(self) -> None:
        """Make the weights of all ranks equal, if they differ; collective.

        The mean difference Δ from the last common weights w is subtracted from w. With an outer optimizer the step is
        SGD with Nesterov momentum: v = μ v + Δ, w = w - η (Δ + μ v) (Douillard et al. 2023, algorithm 1).
        """
        if not self.diverged:
            return
        assert self._anchor is not None
        step = self._differences.packed(self._anchor - self.session.weights(), self.session.shapes)
        outer = self._sync.outer
        if outer is not None:
            self._velocity = step if self._velocity is None else outer.momentum * self._velocity + step
            step = outer.learning_rate * (step + outer.momentum * self._velocity)
        self._anchor = self._anchor - step
        self.session.set_weights(self._anchor)
        if trace_events.recording():
            self._adapter.synchronize()
            trace_events.mark(trace_events.REDUCED)
        self._taken = 0

    def settle(self) -> None:
        """Synchronize, and average the optimizers' slots; collective."""
        self.synchronize()
        self._average_slots("optimizer.")

    def settle_weight_average(self) -> None:
        """Average the ranks' averages: the mean of averages is the average of means; collective."""
        self._average_slots(slot_name(AVERAGE, ""))

    def _average_slots(self, prefix: str) -> None:
        if self._anchor is None or self._differences.transport.data.size == 1:
            return
        state = self.session.state()
        slots = {name: value for name, value in state.items() if name.startswith(prefix) and name.count(".") > 1}
        tensors = [self._adapter.from_numpy(value) for value in slots.values()]
        means = self._adapter.allreduce(tensors, self._differences.transport.data, name="optimizer_slots")
        merged = {name: self._adapter.to_numpy(mean) for name, mean in zip(slots, means, strict=True)}
        self.session.load_state(state | merged)

    def state(self) -> dict[str, np.ndarray]:
        """The state of both codecs and the outer velocity, each name with PREFIX; collective."""
        state = super().state()
        state |= {f"{PREFIX}differences.{name}": value for name, value in self._differences.state().items()}
        if self._velocity is not None:
            parts = self._adapter.part(self._velocity, list(self.session.shapes.values()))
            named = zip(self.session.shapes, parts, strict=True)
            state |= {f"{PREFIX}outer.momentum.{name}": self._adapter.to_numpy(part) for name, part in named}
        return state

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load the state of both codecs and the outer velocity."""
        super().load_state(state)
        parts = parts_of(state)
        self._differences.load_state(parts.get("differences", {}))
        if outer := parts.get("outer"):
            velocities = [outer[f"momentum.{name}"].reshape(-1) for name in self.session.shapes]
            self._velocity = self._adapter.from_numpy(np.concatenate(velocities))
