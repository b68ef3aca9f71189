"""Batch norm of channels-last images. PyTorch's kernel for them is fast, but sums one row after the other.

In float32, its error for 16 images of 112 × 112 is 300 times that of the kernel for contiguous images. Here the kernel
gets each pixel of an image as a separate channel, so that it sums over the images only. A second kernel then sums over
the pixels in a tree. The result is as exact as that of the contiguous kernel, at nearly the channels-last speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import batch_norm


class BatchNorm2d(torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` with exact sums for training on channels-last images on a CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Input and output have shape (n, channels, height, width)."""
        if not (self.training and _fits(input, self.weight)):
            return super().forward(input)
        return _Exact.apply(input, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps)


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == weight.dtype and is_channels_last(x)


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether its memory has that layout alone: with one channel or pixel it has both, and the kernels are the same."""
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The means and biased variances (channels,) of `x` (n, channels, …), as exact as those of contiguous images."""
    if x.device.type != "cpu" or not is_channels_last(x):
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean, variance
    means, variances = torch.batch_norm_update_stats(_rows(x), None, None, 0.0)
    means, variances = means.view(-1, x.shape[1]), variances.view(-1, x.shape[1])
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)  # of groups of equal size (Chan et al. 1983)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(n, channels, height, width), channels last -> (n, height × width × channels), the same memory."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1)


class _Exact(torch.autograd.Function):
    """Ioffe and Szegedy 2015, algorithm 1 and section 3; the running variance is unbiased, as in algorithm 2."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        mean, variance = moments(x)
        count = x.numel() // x.shape[1]
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * (count / (count - 1)), momentum)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps))
        ctx.eps = eps
        return batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, mean, scale, True, ctx.eps, [True, True, True]
        )
        return dx, dweight, dbias, None, None, None, None
