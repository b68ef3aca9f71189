"""Batch norm for MXNet with PyTorch's running statistics, whose variance is unbiased; MXNet's own is biased.

A static graph's backward changes the running statistics, but MXNet's engine treats it as only reading them. So earlier
reads must be waited for, and later operations must write to them first.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import nn

_KERNEL_TENSORS = 60  # the most that one call of MXNet's multi-tensor kernels takes


Shapes = tuple[tuple[int, ...], ...]  # of a model's inputs


class BatchNorm(nn.BatchNorm):
    """Gluon's batch norm; hvdkit corrects its running statistics after each training step. `keep` is the momentum."""

    by_operator: str | None = None  # where that of `synchronized.py` computes it, which needs no correction

    def __init__(self, channels: int, momentum: float, epsilon: float) -> None:
        super().__init__(momentum=momentum, epsilon=epsilon, in_channels=channels)
        self.keep = momentum


class RunningVariances:
    """Makes the running variances of a model's norms unbiased, after each training step.

    `_old` are the values of `_running` before the step; `_counts` are the values per channel of each norm, by the
    shapes of a batch's inputs.
    """

    def __init__(self, model: mx.gluon.Block) -> None:
        norms: list[BatchNorm] = []
        model.apply(lambda block: norms.append(block) if isinstance(block, BatchNorm) else None)
        self._model, self._norms = model, [norm for norm in norms if norm.by_operator is None]
        self._running = [norm.running_var.data() for norm in self._norms]
        self._old = [variance.copy() for variance in self._running]
        self._counts: dict[Shapes, list[int]] = {}

    def before_step(self) -> None:
        """Save the running statistics."""
        for new, old in zip(self._running, self._old, strict=True):
            new.copyto(old)
        for old in self._old:
            old.wait_to_read()

    def after_step(self, shapes: Shapes) -> None:
        """Correct the variances that a batch of these shapes has changed.

        With n values per channel, MXNet computes  new = keep × old + (1 - keep) × biased,  but the last term should be
        (1 - keep) × c × biased  with c = n / (n - 1). The result is  c × new - keep × (c - 1) × old,  which one kernel
        call computes for all norms as  w - rate × (g + decay × w)  with w = new and g = old.
        """
        if not self._norms:
            return
        if shapes not in self._counts:
            values = _values_a_channel(self._model, shapes)
            self._counts[shapes] = [values[norm.name] for norm in self._norms]
        keep = self._norms[0].keep
        rates = [keep / (count - 1) for count in self._counts[shapes]]
        for start in range(0, len(rates), _KERNEL_TENSORS):
            part = slice(start, start + _KERNEL_TENSORS)
            new, old, some = self._running[part], self._old[part], rates[part]
            pairs = [tensor for pair in zip(new, old, strict=True) for tensor in pair]
            mx.nd.multi_sgd_update(*pairs, lrs=some, wds=[-1 / keep] * len(new), num_weights=len(new), out=new)


def _values_a_channel(model: nn.HybridBlock, inputs: Shapes) -> dict[str, int]:
    """The number of values per channel of each layer for inputs of these shapes, by the layer's name."""
    names = [f"input{number}" for number in range(len(inputs))]
    inside = model(*map(mx.sym.var, names)).get_internals()
    _, shapes, _ = inside.infer_shape(**dict(zip(names, inputs, strict=True)))
    sizes = zip(inside.list_outputs(), shapes, strict=True)
    return {
        output.removesuffix("_fwd_output"): size[0] * size[2] * size[3]
        for output, size in sizes
        if output.endswith("_fwd_output") and len(size) == 4
    }
