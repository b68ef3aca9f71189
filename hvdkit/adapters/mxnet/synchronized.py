"""Synchronized batch norm for MXNet (`adapters/batch_statistics.py`): a custom operator that can be hybridized."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import mxnet as mx
from mxnet.gluon import nn
from mxnet.gluon.nn.basic_layers import _BatchNorm

from hvdkit.adapters.batch_statistics import BatchStatistics, StatisticsOf, claims, refusal
from hvdkit.adapters.mxnet.batch_norm import BatchNorm

_REMEDY = "give it a mxnet.gluon.nn.BatchNorm in its place"
_OPERATOR = "hvdkit_batch_norm"
_layers: dict[str, tuple[BatchStatistics | OneRank, _BatchNorm]] = {}
_keys = itertools.count()


class OneRank:
    """As `BatchStatistics`, of this rank alone."""

    def moments(self, *own: Any) -> Any:
        return own

    def gradients(self, count: Any, *sums: Any) -> list[Any]:
        return [total / count.astype(total.dtype) for total in sums]

    def used_again(self, number: int) -> OneRank:
        return self


def synchronize_batch_norms(model: mx.gluon.Block, statistics: StatisticsOf, every: bool) -> list[str]:
    """`core.seam.Adapter.synchronize_batch_norms`: blocks remain the same objects, with another class."""
    done: list[str] = []
    for name, block in _named(model, ""):
        if isinstance(block, _BatchNorm) and (every or claims(block)):
            _check(name, block)
            if (over_ranks := statistics(name)) is not None:
                _use_operator(model, block, over_ranks)
            done.append(name)
        elif claims(block):
            why = "this batch norm is none of Gluon's, and cannot be synchronized"
            raise refusal(name, type(block), why, _REMEDY)
    return done


def sum_exactly(model: mx.gluon.Block) -> None:
    """Have hvdkit's local batch norms use the operator below, on this rank alone; for float64.

    MXNet's kernel adds up one value after the other, and others of its kernels round 0.9 to 0.89999998.
    """
    for _, block in _named(model, ""):
        if isinstance(block, BatchNorm) and block.by_operator is None:
            _use_operator(model, block, OneRank())


def _use_operator(model: mx.gluon.Block, block: _BatchNorm, statistics: BatchStatistics | OneRank) -> None:
    key = str(next(_keys))
    _layers[key] = statistics, block
    block.__dict__["by_operator"] = key
    block.__class__ = _by_operator(block.__class__)
    model.register_forward_pre_hook(lambda *_: block.__dict__.update(uses=0))


def _named(block: mx.gluon.Block, path: str) -> Any:
    """All blocks by their place in the model; Gluon's own names depend on the number of models made before."""
    yield path or "model", block
    for name, child in block._children.items():
        yield from _named(child, f"{path}.{name}" if path else name)


def _axis(layer: _BatchNorm) -> int:
    return int(layer._kwargs.get("axis", 1))


def _check(name: str, block: _BatchNorm) -> None:
    kinds = (_BatchNorm, nn.BatchNorm, BatchNorm, mx.gluon.contrib.nn.SyncBatchNorm)
    if type(block).hybrid_forward not in {kind.hybrid_forward for kind in kinds}:
        why = "it has a `hybrid_forward` of its own, so it cannot be synchronized"
        raise refusal(name, type(block), why, _REMEDY)


@cache
def _by_operator(kind: Any) -> Any:
    def hybrid_forward(self: Any, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any) -> Any:
        settings = self._kwargs
        if settings["use_global_stats"]:
            return kind.hybrid_forward(self, F, x, gamma, beta, running_mean, running_var)
        how = {"key": self.by_operator, "use": self.uses}  # in a forward pass: MXNet may compute two at the same time
        self.__dict__["uses"] += 1
        y = F.Custom(x, gamma, beta, running_mean, running_var, op_type=_OPERATOR, **how)
        return F.Activation(y, act_type="relu") if self.fuse_relu else y

    return type(kind.__name__, (kind,), {"hybrid_forward": hybrid_forward, "uses": 0})


@mx.operator.register(_OPERATOR)
class _Properties(mx.operator.CustomOpProp):
    """What MXNet asks of the operator. An error in here ends the process."""

    def __init__(self, key: str, use: str) -> None:
        super().__init__(need_top_grad=True)
        self._statistics, self._layer = _layers[key]
        self._use = int(use)

    def list_arguments(self) -> list[str]:
        return ["data", "gamma", "beta"]

    def list_auxiliary_states(self) -> list[str]:
        return ["running_mean", "running_var"]

    def infer_shape(self, in_shape: list[Any]) -> Any:
        channels = [in_shape[0][_axis(self._layer)]]
        return [in_shape[0], channels, channels], [in_shape[0]], [channels, channels]

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _Operator:
        statistics = self._statistics.used_again(self._use) if self._use else self._statistics
        return _Operator(statistics, self._layer)


class _Operator(mx.operator.CustomOp):
    """Normalizes by MXNet's own operator, which gets the statistics as if they were constants."""

    def __init__(self, statistics: BatchStatistics | OneRank, layer: _BatchNorm) -> None:
        super().__init__()
        settings = layer._kwargs
        self._statistics, self._axis, self._unbiased = statistics, _axis(layer), isinstance(layer, BatchNorm)
        self._eps, self._momentum, self._fix_gamma = (settings[key] for key in ("eps", "momentum", "fix_gamma"))
        self._batch: Any = None  # of the last forward pass: the number of values, mean and variance of all ranks

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        x, gamma, beta = self._inputs(in_data)
        mean, variance = aux
        if is_train:
            count = mx.nd.full((1,), x.size // gamma.size, ctx=x.context, dtype="float64")
            count, mean, variance = self._statistics.moments(count, *self._moments(x))
            self._batch = count, mean, variance
            keep, factor = self._momentum, (count / (count - 1)).astype(x.dtype) if self._unbiased else 1.0
            aux[0][:] = keep * aux[0] + (1 - keep) * mean
            aux[1][:] = keep * aux[1] + (1 - keep) * (factor * variance)
        self.assign(out_data[0], req[0], self._normalized(x, gamma, beta, mean, variance))

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        count, mean, variance = self._batch
        inputs = x, gamma, _ = [tensor.detach() for tensor in self._inputs(in_data)]
        for tensor in inputs:
            tensor.attach_grad()
        with mx.autograd.record():
            y = self._normalized(*inputs, mean, variance)
        y.backward(out_grad[0])
        dx, d_gamma, d_beta = (tensor.grad for tensor in inputs)
        by_beta, by_gamma = self._statistics.gradients(count, d_beta, d_gamma)
        scale = -gamma / mx.nd.sqrt(variance + self._eps)
        dx = dx + self._normalized(x, scale * by_gamma, scale * by_beta, mean, variance)
        for place, gradient in enumerate((dx, d_gamma, d_beta)):
            self.assign(in_grad[place], req[place], gradient)

    def _inputs(self, in_data: Any) -> Any:
        x, gamma, beta = in_data
        return x, mx.nd.ones_like(gamma) if self._fix_gamma else gamma, beta

    def _moments(self, x: Any) -> tuple[Any, Any]:
        """The means and biased variances (channels,) of `x`.

        MXNet's kernel sums one value after the other, and its exact `mean` takes eight times as long. So the kernel
        gets the channels of each image as channels of their own, whose few statistics `mean` combines (Chan et al.
        1983).
        """
        if self._axis % x.ndim != 1 or x.ndim == 2:
            axes = [axis for axis in range(x.ndim) if axis != self._axis % x.ndim]
            mean = x.mean(axis=axes, keepdims=True)
            return mean.reshape(-1), mx.nd.square(mx.nd.broadcast_sub(x, mean)).mean(axis=axes)
        groups = x.shape[:2]
        ones = mx.nd.ones(groups[0] * groups[1], ctx=x.context, dtype=x.dtype)
        with mx.autograd.train_mode():
            _, means, scales = mx.nd.BatchNorm(
                x.reshape((1, -1, 1, x.size // ones.size)), ones, ones, ones, ones, eps=0.0, momentum=1.0,
                output_mean_var=True, cudnn_off=True,
            )  # fmt: skip
        scales = scales.reshape(groups)  # 1 / √variance; of equal values 0, or infinite
        variances = mx.nd.where(scales == 0, mx.nd.zeros_like(scales), 1 / mx.nd.square(scales))
        means = means.reshape(groups)
        mean = means.mean(axis=0)
        return mean, (variances + mx.nd.square(mx.nd.broadcast_sub(means, mean.expand_dims(0)))).mean(axis=0)

    def _normalized(self, *given: Any) -> Any:
        """`given` are values, scales, offsets, means and variances."""
        return mx.nd.BatchNorm(*given, eps=self._eps, fix_gamma=False, axis=self._axis, use_global_stats=True)
