"""Averages of the weights over updates (EMA) or over ends of epochs (SWA), kept beside the weights.

With `decay` d, after each update: a ← d a + (1 − d) w, and after the first one a = w (Polyak and Juditsky 1992, as
torch.optim.swa_utils.AveragedModel has it, without warm-up). With `from_epoch`, at the end of each epoch from that one
on, a is the equal average of the weights at those ends (Izmailov et al. 2018).

Batch norms' running statistics belong to weights. With `decay` they are averaged as the weights are; with `from_epoch`
they are computed anew by a pass over the training samples (Izmailov et al. 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.core.pieces import Partition, StateEntry, whole_tensors
from hvdkit.core.state import AVERAGE, is_statistic, slot_name
from hvdkit.recipe.schema import AverageWeights

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter
    from hvdkit.core.tensors import Scalar, Tensor


class WeightAverage:
    """The average of this rank's pieces of the parameters, by a `partition`, and of its running statistics.

    `count` is the number of weights in it; without any, its tensors are zeros.
    """

    def __init__(
        self, adapter: Adapter, partition: Partition, buffers: Mapping[str, Tensor], settings: AverageWeights
    ) -> None:
        self._adapter, self._partition, self.settings = adapter, partition, settings
        self.weights = partition.variables()
        self._buffers = {name: tensor for name, tensor in buffers.items() if is_statistic(name)}
        self.statistics = {name: adapter.variable(tensor) for name, tensor in self._buffers.items()}
        self.count = adapter.number(0.0)

    @property
    def started(self) -> bool:
        """Whether there are weights in it."""
        return float(np.asarray(self.count.get())) > 0

    def add(self) -> None:
        """Add the weights as they are; part of a compiled step."""
        averages = [*self.weights.values(), *self.statistics.values()]
        values = [*self._partition.weights(), *self._buffers.values()]
        count, decay = self.count.get(), self.settings.decay
        # The share of the average that stays: none of the zeros before the first weights.
        kept = count / (count + 1) if decay is None else decay * self._begun(count)
        self._adapter.blend(averages, values, kept)
        self.count.set(count + 1)

    def _begun(self, count: Scalar) -> Scalar:
        """1 for a count above 0, else 0."""
        started = count > 0
        return started if isinstance(started, bool) else self._adapter.cast(started, "float64")

    def swap(self) -> None:
        """Exchange the average with the model's weights and running statistics; collective.

        Tensors are exchanged one by one, so that no second copy is in memory.
        """
        ops = self._adapter
        ops.in_order(self._partition.parameters.values())

        def averages() -> Iterator[Tensor]:
            for average, weight in zip(self.weights.values(), self._partition.weights(), strict=True):
                kept, new = weight * 1, average * 1
                ops.assign(average, kept)
                yield new

        self._partition.store(averages())
        for name, buffer in self._buffers.items():
            kept = buffer * 1
            ops.assign(buffer, self.statistics[name] * 1)
            ops.assign(self.statistics[name], kept)

    def entries(self) -> list[StateEntry]:
        """The average as entries of a state."""
        prefix = slot_name(AVERAGE, "")
        statistics = replace(whole_tensors(self._adapter, self.statistics), prefix=prefix)
        return [StateEntry(self._partition, self.weights, prefix), statistics]
