"""Synchronized batch norm for PyTorch (`hvdkit/adapters/batch_statistics.py`)."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import horovod.torch as hvd
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hvdkit.adapters.batch_statistics import BatchStatistics, StatisticsOf, claims, refusal
from hvdkit.adapters.pytorch.batch_norm import BatchNorm2d, Normalized

_SIGNATURE = inspect.signature(batch_norm)
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
    base = next(base for base in kind.__mro__ if base not in _SELF_MADE)

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
        given = _SIGNATURE.bind(*arguments, **named)
        given.apply_defaults()
        x, mean, variance, weight, bias, training, momentum, eps = given.args
        if not training:
            return function(*given.args)
        return Normalized.apply(self._statistics, x, mean, variance, weight, bias, momentum, eps)
