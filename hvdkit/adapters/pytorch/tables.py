"""A table of vectors that is a model's first layer and its last: its gradient is one tensor.

PyTorch makes the gradients of both uses and then their sum, three tensors as large as the table: 442 MiB for GPT-2's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class TiedEmbedding(nn.Embedding):
    """As `nn.Embedding`, but returns the rows (…, width), and the table (rows, width) for its second use."""

    def forward(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, table = _Rows.apply(indices, self.weight)
        return rows, table


class _Rows(torch.autograd.Function):
    """Looks up rows. In backward, their gradients are added to the gradient of the table's second use."""

    @staticmethod
    def forward(context: Any, indices: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        context.save_for_backward(indices)
        return nn.functional.embedding(indices, table), table.view_as(table)

    @staticmethod
    def backward(context: Any, of_rows: torch.Tensor, of_table: torch.Tensor) -> tuple[None, torch.Tensor]:
        (indices,) = context.saved_tensors
        return None, of_table.index_add_(0, indices.flatten(), of_rows.flatten(0, -2))
