"""Batch norm for MXNet with PyTorch's running statistics, whose variance is unbiased; MXNet's own is biased.

A static graph's backward changes the running statistics, but declares to MXNet's engine that it only reads them. So
what reads them before has to be waited for, and what comes after has to write to them first.
"""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
from mxnet.gluon import nn

_KERNEL_TENSORS = 60  # what one call of MXNet's multi-tensor kernels takes at most


class BatchNorm(nn.BatchNorm):
    """Gluon's, whose running statistics hvdkit corrects after each training step. `keep` is the momentum."""

    def __init__(self, channels: int, momentum: float, epsilon: float) -> None:
        super().__init__(momentum=momentum, epsilon=epsilon, in_channels=channels)
        self.keep = momentum

    def leave_statistics(self) -> None:
        """Put the batch's own mean and biased variance in the place of the running ones; before the first call."""
        self._kwargs["momentum"] = 0.0


class Statistics:
    """Corrects the running statistics of a network's norms, for batches of one shape.

    `old` is what `running` was before the batch, `counts` are the values that the batch has in a channel.
    """

    def __init__(self, network: nn.HybridBlock, norms: list[BatchNorm], shape: tuple[int, ...]) -> None:
        values = _values_a_channel(network, shape)
        self._keep = norms[0].keep
        self._counts = [values[norm.name] for norm in norms]
        self._running = self._watched(norms)
        self._old = [statistic.copy() for statistic in self._running]

    def _watched(self, norms: list[BatchNorm]) -> list[mx.nd.NDArray]:
        return [norm.running_var.data() for norm in norms]

    def before_step(self) -> None:
        """Keep them as they are."""
        for new, old in zip(self._running, self._old, strict=True):
            new.copyto(old)
        for old in self._old:
            old.wait_to_read()

    def after_step(self) -> None:
        """With n values in a channel, MXNet computes  new = keep × old + (1 - keep) × biased,  but the variance wanted
        is (1 - keep) × n / (n - 1) × biased. With c = n / (n - 1) that is  c × new - keep × (c - 1) × old,  for all
        norms by one call of a kernel:  w - rate × (g + decay × w)  with new for w and old for g.
        """
        keep = self._keep
        rates = [keep / (count - 1) for count in self._counts]
        for start in range(0, len(rates), _KERNEL_TENSORS):
            part = slice(start, start + _KERNEL_TENSORS)
            new, old, some = self._running[part], self._old[part], rates[part]
            pairs = [tensor for pair in zip(new, old, strict=True) for tensor in pair]
            mx.nd.multi_sgd_update(*pairs, lrs=some, wds=[-1 / keep] * len(new), num_weights=len(new), out=new)


class ExactStatistics(Statistics):
    """For float64: to MXNet's batch norm and kernels 0.9 is 0.89999998. The norms leave the batch's own statistics."""

    def _watched(self, norms: list[BatchNorm]) -> list[mx.nd.NDArray]:
        return super()._watched(norms) + [norm.running_mean.data() for norm in norms]

    def after_step(self) -> None:
        factors = [count / (count - 1) for count in self._counts] + [1.0] * len(self._counts)
        for new, old, factor in zip(self._running, self._old, factors, strict=True):
            new *= (1 - self._keep) * factor
            new += self._keep * old


def statistics_of(network: mx.gluon.Block, dtype: str) -> Callable[[tuple[int, ...]], Statistics | None]:
    """What makes a network's `Statistics` for a shape of images; None where it has no `BatchNorm` of this module."""
    norms: list[BatchNorm] = []
    network.apply(lambda block: norms.append(block) if isinstance(block, BatchNorm) else None)
    if not norms:
        return lambda shape: None
    if dtype == "float64":
        for norm in norms:
            norm.leave_statistics()
        return lambda shape: ExactStatistics(network, norms, shape)
    return lambda shape: Statistics(network, norms, shape)


def _values_a_channel(network: nn.HybridBlock, shape: tuple[int, ...]) -> dict[str, int]:
    """How many values a batch of images of `shape` has in one channel of each layer, by the layer's name."""
    inside = network(mx.sym.var("images")).get_internals()
    _, shapes, _ = inside.infer_shape(images=shape)
    sizes = zip(inside.list_outputs(), shapes, strict=True)
    return {
        output.removesuffix("_fwd_output"): size[0] * size[2] * size[3]
        for output, size in sizes
        if output.endswith("_fwd_output") and len(size) == 4
    }
