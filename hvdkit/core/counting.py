"""Losses as sums: a loss that returns (sum, count) is added up over batches and ranks, and divided once.

An update minimizes Σ sum / Σ count over its batches and all ranks, whose gradient is Σ ∇sum / Σ count. So each batch's
sum is differentiated, gradients are averaged over batches and ranks as those of any loss, counts are averaged beside
them, and the one mean is divided by the other. A mean of the batches' own means would weigh their targets unequally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.core.seam import Adapter, CountedLoss, LossFunction
from hvdkit.core.strategy import Strategy
from hvdkit.core.tensors import Scalar, Tensor, scalar
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.core.pipeline import Pipeline

_DTYPE = "float64"  # of counts: exact up to 2^53 targets, whatever the dtype of the loss


class Counting:
    """A loss (outputs, targets) -> mean, or (sum, count), as the one value that a framework differentiates.

    That is the mean, or the sum × `unit`. `targets` is about how many targets a batch has: `unit` is 1 over the next
    power of two, so that sums and their gradients stay in float16's range. It changes no bit of a result, and is the
    same for all batches and ranks. `counts` says whether the loss returns pairs; None before the first batch.

    Counts are tensors (1,) in float64, × `unit`. With `in_stages`, of a pipeline, they are added up as its last stage
    calls the loss, and all stages are told before the update.
    """

    def __init__(
        self, adapter: Adapter, loss: LossFunction | CountedLoss, targets: int = 1, in_stages: bool = False
    ) -> None:
        self._adapter, self._loss, self._in_stages = adapter, loss, in_stages
        self.unit = 2.0 ** -math.ceil(math.log2(max(1, targets)))
        self.counts: bool | None = None
        zero = adapter.from_numpy(np.zeros(1, _DTYPE))
        self._told = False
        self.batch_count: Tensor = None  # of the last batch that was differentiated
        self._sum, self._last = adapter.variable(zero), adapter.variable(zero)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The value to differentiate. Raises RequestError unless the loss returns one value, or such a pair."""
        value, count = self._called(outputs, targets)
        if self.counts is not None and self.counts != (count is not None):
            raise RequestError("loss: expected one value for all batches, or (sum, count) for all; got both")
        self.counts = count is not None
        if count is None:
            return value
        if not self._adapter.counts:
            raise RequestError(
                f"--rival {self._adapter.rival}: expected a loss that returns one value, got (sum, count)"
            )
        self.batch_count = count * self.unit
        if self._in_stages:
            self.add()
        return value * self.unit

    def of(self, outputs: Tensor, targets: Tensor) -> tuple[float, float | None]:
        """The mean and None, or the sum and its count. No gradient is computed. Raises RequestError as above."""
        value, count = self._called(outputs, targets)
        to_numpy = self._adapter.to_numpy
        return float(to_numpy(value).mean()), None if count is None else float(to_numpy(count)[0])

    def add(self) -> None:
        """Add the count of the last batch to those of its update."""
        if self.counts:
            self._adapter.assign(self._sum, self._sum + self.batch_count)

    def tell_stages(self, pipeline: Pipeline) -> None:
        """Give all stages what the last one has counted in an update; collective over the pipeline.

        Once they know that the loss returns one value, nothing is sent.
        """
        if self._told and not self.counts:
            return
        count = float(self._adapter.to_numpy(self._sum)[0])
        counts, total = pipeline.from_last([float(bool(self.counts)), count])
        self.counts, self._told = bool(counts), True
        self._adapter.assign(self._sum, self._adapter.from_numpy(np.array([total], _DTYPE)))

    def average_and_update(
        self,
        strategy: Strategy,
        update: Callable[[Mapping[str, Tensor]], None],
        gradients: Mapping[str, Tensor],
        average: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        batch_count: Scalar | None = None,
    ) -> None:
        """Average over ranks and call `update`: with the last batch's gradients, or the mean of `batch_count` added.

        An update whose batches count nothing on any rank changes nothing; means that no update takes are waited
        for, as the next ones are sent under the same names.
        """
        ops, mean = self._adapter, self.taken(strategy, batch_count)
        if strategy.linear:
            means = average(gradients)
            wait = (lambda: None) if strategy.trainable.traced else self._adapter.synchronize
            ops.when(mean > 0, lambda: update(self.over_count(means, mean)), wait)
        else:  # what such a strategy keeps for later updates is in the unit of their means
            ops.when(mean > 0, lambda: update(average(self.over_count(gradients, mean))), lambda: None)

    def taken(self, strategy: Strategy, batch_count: Scalar | None = None) -> Tensor:
        """The mean count over ranks of the last batch, or of so many whose counts were added; collective."""
        assign, count = self._adapter.assign, self.batch_count
        if batch_count is not None:
            count = self._sum / scalar(self._adapter, batch_count, self._sum)
            assign(self._sum, self._adapter.zeros_like(self._sum))
        assign(self._last, count)
        return strategy.mean_count(self._last * 1)

    def probed(
        self, strategy: Strategy, own: dict[str, Tensor], gradients: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a rank contributes to the mean gradients of one batch a rank, and these; collective."""
        mean = self.taken(strategy)
        own = self.over_count(own, mean)
        if strategy.linear:
            return own, self.over_count(strategy.average(gradients), mean)
        return own, strategy.average(self.over_count(gradients, mean))

    def over_count(self, gradients: Mapping[str, Tensor], count: Tensor) -> dict[str, Tensor]:
        """The gradients over a count; they may change in place. Nothing is divided by 0."""
        ops = self._adapter
        factor = 1 / ops.where(count > 0, count, count * 0 + 1)
        return {
            name: ops.scaled(gradient, scalar(self._adapter, factor, gradient)) for name, gradient in gradients.items()
        }

    def mean(self, loss: Scalar) -> Tensor:
        """This rank's mean loss of the last update, of the mean of what its batches returned; 0 without a count."""
        if not self.counts:
            return loss
        value = loss if isinstance(loss, float) else self._adapter.cast(loss, _DTYPE)
        where = self._adapter.where
        return value / where(self._last > 0, self._last, self._last * 0 + 1)

    def last(self) -> float | None:
        """This rank's count of the last update × `unit`, over its batches; None if the loss is a mean."""
        return float(self._adapter.to_numpy(self._last)[0]) if self.counts else None

    def _called(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        returned = self._loss(outputs, targets)
        if not isinstance(returned, tuple | list):
            return _one_value(returned, "the mean over the batch, or (sum, count)"), None
        if len(returned) != 2:
            raise RequestError(
                f"loss: expected one value or (sum, count), got a {type(returned).__name__} of {len(returned)}"
            )
        value, count = returned
        return _one_value(value, "the sum over the batch, in (sum, count)"), self._count(count)

    def _count(self, count: Scalar) -> Tensor:
        if isinstance(count, int | float | np.number | np.ndarray):
            count = self._adapter.from_numpy(np.asarray(count, _DTYPE).reshape(-1))
        count = _one_value(count, "or a number, the count of the batch, in (sum, count)")
        if getattr(count, "requires_grad", False):
            raise RequestError("loss: expected a count that does not depend on parameters, in (sum, count)")
        return self._adapter.cast(self._adapter.reshape(count, (1,)), _DTYPE)


def _one_value(value: Tensor, what: str) -> Tensor:
    shape = getattr(value, "shape", None)
    if shape is None or any(size != 1 for size in shape):
        got = f"the shape {tuple(shape)}" if shape else f"a {type(value).__name__}; return the tensor itself"
        raise RequestError(f"loss: expected a tensor of one value, {what}, got {got}")
    return value
