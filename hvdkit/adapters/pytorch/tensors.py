"""PyTorch's tensor operations (`hvdkit/core/tensors.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.core.tensors import PlainNumber


def variable(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like)


def assign(variable: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        variable.copy_(value)


def number(value: float) -> PlainNumber:
    return PlainNumber(value)


def when(condition: torch.Tensor, then: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
    (then if condition else otherwise)()


def transpose(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    return tensor.permute(tuple(axes))


def sqrt(tensor: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(tensor)


def norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor)


def where(condition: torch.Tensor, if_true: torch.Tensor, if_false: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, if_true, if_false)


def scaled(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return tensor.mul_(factor.reshape(()))


def blend(averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], kept: float) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(averages), kept)
        torch._foreach_add_(list(averages), list(values), alpha=1 - kept)


def reshape(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return tensor.reshape(tuple(shape))


def concat(tensors: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    return torch.cat(list(tensors), dim=axis)


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def part(vector: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    pieces = torch.split(vector, [math.prod(shape) for shape in shapes])
    return [piece.reshape(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def floor(tensor: torch.Tensor) -> torch.Tensor:
    return torch.floor(tensor)


def largest(matrix: torch.Tensor) -> torch.Tensor:
    return torch.amax(matrix, dim=1, keepdim=True)


def top_k(matrix: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(matrix, count, dim=1, sorted=False).indices.to(torch.int32)


def gather(vector: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return vector[indices]


def scatter_add(vector: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return vector.index_add_(0, indices, values)


def matmul(
    left: torch.Tensor, right: torch.Tensor, transpose_left: bool = False, transpose_right: bool = False
) -> torch.Tensor:
    return (left.T if transpose_left else left) @ (right.T if transpose_right else right)


def uniform(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def from_bytes(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(
        getattr(torch, dtype)
    )  # the copy is aligned, as `view` requires
