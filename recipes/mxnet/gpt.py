"""GPT-2 in MXNet's Gluon.

    horovodrun -np 2 python recipes/mxnet/gpt.py recipes/gpt-tiny.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import math
import sys

import numpy as np

from hvdkit.adapters import mxnet as adapter
from hvdkit.adapters.parts import LayerParts
from hvdkit.tasks import gpt
from hvdkit.worker.entry import main

import mxnet as mx  # isort: skip  # after the adapter, which makes MXNet's start-up faster
from mxnet.gluon import nn  # isort: skip

_TWICE = 2 * math.sqrt(2 / math.pi)


class Linear(nn.HybridBlock):
    """A linear layer whose matrix is (in, out), as GPT-2's files have it.

    With `parts` it has some of the rows of a matrix. The products of all ranks are added up, and then the bias.
    """

    def __init__(self, inputs: int, outputs: int, parts: LayerParts | None = None) -> None:
        super().__init__()
        self.outputs, self.parts = outputs, parts if parts and parts.group else None
        self.weight = self.params.get("weight", shape=(inputs, outputs))
        self.bias = self.params.get("bias", shape=(outputs,))

    def hybrid_forward(self, F, x, weight, bias):
        # Much faster than F.dot and F.broadcast_add, whose backward sums in one thread.
        how = {"num_hidden": self.outputs, "flatten": False}
        if self.parts:
            y = self.parts.leave(F.FullyConnected(x, F.transpose(weight), no_bias=True, **how))
            return F.broadcast_add(y, bias.reshape((1, 1, -1)))
        return F.FullyConnected(x, F.transpose(weight), bias, **how)


class LayerNorm(nn.LayerNorm):
    """Layer norm with an epsilon in float64 precision; MXNet's own is always a float32."""

    def __init__(self, table: gpt.GPT) -> None:
        super().__init__(epsilon=table.norm_epsilon, in_channels=table.width)
        # (s x − s m) / sqrt(s² v + s² e) does not depend on s, and s² e is e as a float32.
        rounded = float(np.float32(table.norm_epsilon))
        self.factor = math.sqrt(rounded / table.norm_epsilon) if table.dtype == "float64" else None

    def hybrid_forward(self, F, x, gamma, beta):
        return super().hybrid_forward(F, x * self.factor if self.factor else x, gamma, beta)


class Attention(nn.HybridBlock):
    """Causal self-attention: a token sees itself and those before it. Ranks divide its heads."""

    def __init__(self, table: gpt.GPT, parts: LayerParts) -> None:
        super().__init__()
        self.parts, width = parts, table.width // parts.size
        self.heads, self.scale = table.heads // parts.size, (table.width // table.heads) ** -0.5
        self.c_attn = Linear(table.width, 3 * width)
        self.c_proj = Linear(width, table.width, parts)

    def hybrid_forward(self, F, x):
        # (n, t, 3 × width) to three times (n, heads, t, width / heads)
        q, k, v = self.c_attn(self.parts.enter(x)).reshape((0, 0, 3 * self.heads, -1)).transpose((0, 2, 1, 3)).split(3)
        place = F.contrib.arange_like(x, axis=1)
        later = F.broadcast_lesser(place.reshape((1, 1, -1, 1)), place.reshape((1, 1, 1, -1)))
        scores = F.linalg.gemm2(q, k, transpose_b=True, alpha=self.scale)
        y = F.linalg.gemm2(F.softmax(F.broadcast_add(scores, F.BlockGrad(later * -1e9))), v)
        return self.c_proj(y.transpose((0, 2, 1, 3)).reshape((0, 0, -3)))


class MLP(nn.HybridBlock):
    """Two linear layers with GELU, in its tanh form, between them. Ranks divide the values between them."""

    def __init__(self, width: int, parts: LayerParts) -> None:
        super().__init__()
        self.parts, inner = parts, 4 * width // parts.size
        self.c_fc = Linear(width, inner)
        self.c_proj = Linear(inner, width, parts)

    def hybrid_forward(self, F, x):
        x = self.c_fc(self.parts.enter(x))
        # (1 + tanh(y)) / 2 is the logistic function of 2y, for which there is a fast kernel
        twice = x * (F.square(x) * (0.044715 * _TWICE) + _TWICE)
        return self.c_proj(x * F.Activation(twice, act_type="sigmoid"))


class Block(nn.HybridBlock):
    """Attention and MLP, each after a layer norm, and each added to its input."""

    def __init__(self, table: gpt.GPT, name: str) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(table)
        self.attn = Attention(table, LayerParts(adapter, table.tensor, f"{name}.attn"))
        self.ln_2 = LayerNorm(table)
        self.mlp = MLP(table.width, LayerParts(adapter, table.tensor, f"{name}.mlp"))

    def hybrid_forward(self, F, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.HybridBlock):
    """A model from tokens (n, t) to logits (n, t, vocabulary). Ranks divide the vocabulary.

    Between two stages of a pipeline are vectors (n, t, width).
    """

    def __init__(self, table: gpt.GPT) -> None:
        super().__init__()
        self.parts = LayerParts(adapter, table.tensor, "transformer.wte")
        self.dtype, self.here = table.dtype, table.here
        self.first, self.stop = table.vocabulary_part
        if table.tensor:
            from hvdkit.adapters.mxnet.parts import DividedOutputs

            self.divided_outputs = DividedOutputs(adapter, table.tensor, self.first, table.vocabulary)
        parts = self.transformer = nn.HybridBlock()
        if self.here.is_first or self.here.is_last:
            parts.wte = nn.Embedding(self.stop - self.first, table.width)
        if self.here.is_first:
            parts.wpe = nn.Embedding(table.context, table.width)
        parts.h = nn.HybridSequential()
        for name in table.blocks:
            parts.h.register_child(Block(table, name), name.rpartition(".")[2])
        if self.here.is_last:
            parts.ln_f = LayerNorm(table)

    def hybrid_forward(self, F, x):
        parts = self.transformer
        if self.here.is_first:
            places = _weight(F, parts.wpe).expand_dims(0)
            x = self.embedded(F, x)
            x = F.broadcast_add(x, F.slice_like(places, x, axes=(1,)))
        x = parts.h(x)
        if not self.here.is_last:
            return x
        how = {"num_hidden": parts.wte.weight.shape[0], "no_bias": True, "flatten": False}
        return F.FullyConnected(self.parts.enter(parts.ln_f(x)), _weight(F, parts.wte), **how)

    def embedded(self, F, tokens):
        """The vectors of the tokens. A rank adds nothing for tokens whose vectors another one has."""
        if not self.parts.group:
            return self.transformer.wte(tokens)
        here = (tokens >= self.first) * (tokens < self.stop)
        rows = self.transformer.wte((tokens - self.first) * here)
        return self.parts.leave(F.broadcast_mul(rows, F.cast(here, self.dtype).expand_dims(-1)))


def _weight(F, layer):
    return layer.weight.var() if F is mx.sym else layer.weight.data()


build = GPT

if __name__ == "__main__":
    main(adapter, build, sys.argv[1:])
