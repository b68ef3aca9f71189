"""PyTorch's tensor operations (`hvdkit/core/tensors.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvdkit.core.tensors import Scalar, Tensors


class TorchTensors(Tensors):
    """The operations on `device`."""

    device = torch.device("cpu")
    variable = staticmethod(torch.zeros_like)
    norm = staticmethod(torch.linalg.vector_norm)
    where = staticmethod(torch.where)

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=self.device)

    def to_numpy(self, tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        return np.array((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype))

    def assign(self, variable: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            variable.copy_(value)

    def blend(self, averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], kept: Scalar) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(averages), kept)
            torch._foreach_add_(list(averages), list(values), alpha=1 - kept)

    def transpose(self, tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return tensor.permute(tuple(axes))

    def concat(self, tensors: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        return torch.cat(list(tensors), dim=axis)

    def largest(self, matrix: torch.Tensor) -> torch.Tensor:
        return torch.amax(matrix, dim=1, keepdim=True)

    def top_k(self, matrix: torch.Tensor, count: int) -> torch.Tensor:
        return torch.topk(matrix, count, dim=1, sorted=False).indices.to(torch.int32)

    def scatter_add(self, vector: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return vector.index_add_(0, indices, values)

    def uniform(self, like: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)

    def view(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        copy = tensor.clone(memory_format=torch.contiguous_format)  # aligned, as a view needs
        return copy.view(getattr(torch, dtype))
