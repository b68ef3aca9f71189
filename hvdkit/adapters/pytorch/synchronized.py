"""Synchronized batch norm for PyTorch (`hvdkit/core/batch_statistics.py`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hvdkit.adapters.pytorch.batch_norm import BatchNorm2d, is_channels_last, moments
from hvdkit.core.batch_statistics import BatchStatistics, StatisticsOf
from hvdkit.core.synchronized import claims, refusal

_SELF_MADE = (BatchNorm2d, hvd.SyncBatchNorm)  # their `forward` does not call `batch_norm`; that of their base does
_REMEDY = "give it a torch.nn.BatchNorm in its place"


def synchronize_batch_norms(model: nn.Module, statistics: StatisticsOf, every: bool) -> list[str]:
    """`core.seam.Adapter.synchronize_batch_norms`: layers remain the same objects, with another class."""
    done = []
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and (every or claims(layer)):
            layer.__dict__["statistics"] = statistics(name or "model")
            layer.__class__ = _synchronized(layer.__class__)
            done.append(name)
        elif claims(layer) or (every and "BatchNorm" in getattr(layer, "original_name", "")):  # the latter is scripted
            raise refusal(
                name, type(layer), "this batch norm is none of PyTorch's, and cannot be synchronized", _REMEDY
            )
    return done


@cache
def _synchronized(kind: Any) -> Any:
    """A subclass in whose `forward` PyTorch's function `batch_norm` computes statistics over all ranks."""
    base = next(each for each in kind.__mro__ if each not in _SELF_MADE)

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        if not self.training or self.statistics is None:
            return base.forward(self, *arguments, **named)
        with _Calls(self.statistics) as calls:
            outputs = base.forward(self, *arguments, **named)
        if not calls.seen:
            why = "its forward does not call torch.nn.functional.batch_norm, so it cannot be synchronized"
            raise refusal(self.statistics.layer, kind, why, _REMEDY)
        return outputs

    return type(f"Synchronized{kind.__name__}", (kind,), {"forward": forward})


class _Calls(TorchFunctionMode):
    """While it is active, calls of `batch_norm` with a batch's statistics are synchronized."""

    def __init__(self, statistics: BatchStatistics) -> None:
        super().__init__()
        self.seen, self._statistics = False, statistics

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function is not batch_norm:
            return function(*arguments, **named)
        self.seen = True
        return _batch_norm(self._statistics, *arguments, **named)


def _batch_norm(
    statistics: BatchStatistics,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm`."""
    if not training:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _Synchronized.apply(statistics, input, running_mean, running_var, weight, bias, momentum, eps)


class _Synchronized(torch.autograd.Function):
    """The running variance is unbiased, as in PyTorch."""

    @staticmethod
    def forward(
        ctx: Any,
        statistics: BatchStatistics,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        values = x.numel() // x.shape[1]
        count = torch.full((1,), float(values), dtype=torch.float64, device=x.device)
        count, mean, variance = statistics.moments(count, *moments(_wide(x)))
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (count / (count - 1)).to(variance.dtype)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.statistics, ctx.eps = statistics, eps
        return batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        wide, scale = _wide(x), torch.rsqrt(variance + ctx.eps)
        layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        dy = _wide(dy).contiguous(memory_format=layout)
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dy, wide, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )  # as if the statistics were constants; the sums are those of dy × normalized x, and of dy
        if ctx.needs_input_grad[1]:
            scale = -scale if weight is None else -scale * weight
            by_bias, by_weight = ctx.statistics.gradients(count, dbias, dweight)
            dx += batch_norm(wide, mean, variance, scale * by_weight, scale * by_bias, False, 0.0, ctx.eps)
        given = None if weight is None else dweight, None if weight is None else dbias
        return None, dx.to(x.dtype), None, None, *given, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 if it has less."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
