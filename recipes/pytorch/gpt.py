"""GPT-2 in PyTorch.

    horovodrun -np 2 python recipes/pytorch/gpt.py recipes/gpt-tiny.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import sys
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hvdkit.adapters import pytorch
from hvdkit.adapters.parts import LayerParts
from hvdkit.adapters.pytorch.tables import TiedEmbedding
from hvdkit.tasks import gpt
from hvdkit.worker.entry import main


class Linear(nn.Module):
    """A linear layer whose matrix is (in, out), as GPT-2's files have it.

    With `parts` it has some of the rows of a matrix. The products of all ranks are added up, and then the bias.
    """

    def __init__(self, inputs: int, outputs: int, parts: LayerParts | None = None) -> None:
        super().__init__()
        self.parts = parts if parts and parts.group else None
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.parts:
            return self.parts.leave(x @ self.weight) + self.bias
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Attention(nn.Module):
    """Causal self-attention: a token sees itself and those before it. Ranks divide its heads."""

    def __init__(self, table: gpt.GPT, parts: LayerParts) -> None:
        super().__init__()
        self.parts, width = parts, table.width // parts.size
        self.heads = table.heads // parts.size
        self.c_attn = Linear(table.width, 3 * width)
        self.c_proj = Linear(width, table.width, parts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.parts.enter(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with GELU, in its tanh form, between them. Ranks divide the values between them."""

    def __init__(self, width: int, parts: LayerParts) -> None:
        super().__init__()
        self.parts, inner = parts, 4 * width // parts.size
        self.c_fc = Linear(width, inner)
        self.c_proj = Linear(inner, width, parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(self.parts.enter(x)), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm, and each added to its input."""

    def __init__(self, table: gpt.GPT, name: str) -> None:
        super().__init__()
        self.recompute = table.recompute
        self.ln_1 = nn.LayerNorm(table.width, table.norm_epsilon)
        self.attn = Attention(table, LayerParts(pytorch, table.tensor, f"{name}.attn"))
        self.ln_2 = nn.LayerNorm(table.width, table.norm_epsilon)
        self.mlp = MLP(table.width, LayerParts(pytorch, table.tensor, f"{name}.mlp"))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The block's output; with `recompute`, it is computed again in backward."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A model from tokens (n, t) to logits (n, t, vocabulary), built from its table. Ranks divide the vocabulary.

    Between two stages of a pipeline are vectors (n, t, width).
    """

    def __init__(self, table: gpt.GPT) -> None:
        super().__init__()
        self.parts = LayerParts(pytorch, table.tensor, "transformer.wte")
        self.first, stop = table.vocabulary_part
        if table.tensor:
            from hvdkit.adapters.pytorch.parts import DividedOutputs

            self.divided_outputs = DividedOutputs(pytorch, table.tensor, self.first, table.vocabulary)
        self.here, parts = table.here, nn.ModuleDict()
        if self.here.is_first or self.here.is_last:
            parts["wte"] = TiedEmbedding(stop - self.first, table.width)
        if self.here.is_first:
            parts["wpe"] = nn.Embedding(table.context, table.width)
        parts["h"] = nn.Sequential(OrderedDict((name.split(".")[-1], Block(table, name)) for name in table.blocks))
        if self.here.is_last:
            parts["ln_f"] = nn.LayerNorm(table.width, table.norm_epsilon)
        self.transformer = parts

    def forward(self, x: Tensor) -> Tensor:
        parts = self.transformer
        words = parts["wte"].weight if self.here.is_last else None
        if self.here.is_first:
            x, words = self.embedded(x)
        x = parts["h"](x)
        return self.parts.enter(parts["ln_f"](x)) @ words.T if self.here.is_last else x

    def embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of tokens and of their places, and the table for its second use."""
        parts = self.transformer
        if self.parts.group:
            here = (tokens >= self.first) & (tokens < self.first + parts["wte"].num_embeddings)
            x, words = parts["wte"]((tokens - self.first).where(here, 0))
            x = self.parts.leave(x * here[..., None])
        else:
            x, words = parts["wte"](tokens)
        return x + parts["wpe"].weight[: tokens.shape[1]], words


build = GPT

if __name__ == "__main__":
    main(pytorch, build, sys.argv[1:])
