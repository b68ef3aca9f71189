"""Products of matrices by oneDNN. PyTorch itself takes MKL for those in float32, which is slow on AMD's processors.

For the matrices of `recipes/gpt-tiny.yaml`, on one core of an AMD EPYC with AVX-512 (family 26) PyTorch 2.13.0,
MKL reached 105 GFLOP/s, as with AVX2, and oneDNN 200.
"""

from __future__ import annotations

from typing import Any

import torch

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (…, in) @ weight (in, out) + bias (out,), with gradients."""
    rows = x.flatten(0, -2)
    if _HAS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        found = _Product.apply(rows, weight, bias)
    else:
        found = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return found.unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    """A product of matrices whose gradients are oneDNN's products too. That of `weight` has its memory layout."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        context.save_for_backward(rows, weight)
        return _by_onednn(rows, weight, bias)

    @staticmethod
    def backward(
        context: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        rows, weight = context.saved_tensors
        to_rows, to_weight, to_bias = context.needs_input_grad
        of_weight = None
        if to_weight:
            columns = weight.stride(0) < weight.stride(1)  # of a table (out, in) that is passed transposed
            of_weight = _by_onednn(gradient.T, rows).T if columns else _by_onednn(rows.T, gradient)
        return _by_onednn(gradient, weight.T) if to_rows else None, of_weight, gradient.sum(0) if to_bias else None


def _by_onednn(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.T, bias, "none", [], "")
