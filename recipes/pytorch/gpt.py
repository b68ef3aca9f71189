"""GPT-2 in PyTorch.

    horovodrun -np 2 python recipes/pytorch/gpt.py recipes/gpt-tiny.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hvdkit.adapters import pytorch
from hvdkit.adapters.pytorch.tables import TiedEmbedding
from hvdkit.tasks import gpt
from hvdkit.worker.entry import main


class Linear(nn.Module):
    """A linear layer whose matrix is (in, out), as GPT-2's files have it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Attention(nn.Module):
    """Causal self-attention: a token sees itself and those before it."""

    def __init__(self, table: gpt.GPT) -> None:
        super().__init__()
        self.heads = table.heads
        self.c_attn = Linear(table.width, 3 * table.width)
        self.c_proj = Linear(table.width, table.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU, in its tanh form, between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = Linear(width, 4 * width)
        self.c_proj = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm, and each added to its input."""

    def __init__(self, table: gpt.GPT) -> None:
        super().__init__()
        self.recompute = table.recompute
        self.ln_1 = nn.LayerNorm(table.width, table.norm_epsilon)
        self.attn = Attention(table)
        self.ln_2 = nn.LayerNorm(table.width, table.norm_epsilon)
        self.mlp = MLP(table.width)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The block's output; with `recompute`, it is computed again in backward."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A model from tokens (n, t) to logits (n, t, vocabulary), built from its table."""

    def __init__(self, table: gpt.GPT) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": TiedEmbedding(table.vocabulary, table.width),
                "wpe": nn.Embedding(table.context, table.width),
                "h": nn.ModuleList(Block(table) for _ in range(table.layers)),
                "ln_f": nn.LayerNorm(table.width, table.norm_epsilon),
            }
        )

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x, words = parts["wte"](tokens)
        x = x + parts["wpe"].weight[: tokens.shape[1]]
        for block in parts["h"]:
            x = block(x)
        return parts["ln_f"](x) @ words.T


build = GPT

if __name__ == "__main__":
    main(pytorch, build, sys.argv[1:])
