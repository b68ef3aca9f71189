"""GPT-2 in Keras 3 (on TensorFlow), trained by `model.fit`.

    horovodrun -np 2 python recipes/keras/gpt.py recipes/gpt-tiny.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import math
import sys

from hvdkit.adapters import keras as adapter
from hvdkit.adapters.parts import LayerParts
from hvdkit.tasks import gpt
from hvdkit.worker.entry import main

import keras  # isort: skip  # after the adapter, which silences TensorFlow's start-up messages
from keras import layers, ops  # isort: skip


# Layers compute in `compute_dtype`, while variables are in `dtype`.
POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


def gelu(x):
    """GELU in its tanh form; the constants of `keras.ops.gelu` are float32 always."""
    return 0.5 * x * (1 + ops.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class Linear(layers.Layer):
    """A linear layer, as one product of matrices.

    With `parts` it has some of the rows of a matrix. The products of all ranks are added up, and then the bias.
    """

    def __init__(self, outputs: int, name: str, policy: str, parts: LayerParts | None = None):
        super().__init__(name=name, dtype=policy)
        self.outputs, self.parts = outputs, parts

    def build(self, shape):
        self.weight = self.add_weight((shape[-1], self.outputs), "zeros", name="weight")
        self.bias = self.add_weight((self.outputs,), "zeros", name="bias")

    def call(self, x):
        rows = ops.reshape(x, (-1, self.weight.shape[0]))
        y = ops.matmul(rows, self.weight)
        y = (self.parts.leave(y) if self.parts else y) + self.bias
        return ops.reshape(y, (-1, ops.shape(x)[1], self.outputs))


class Block(layers.Layer):
    """Causal attention and MLP, each after a layer norm, and each added to its input.

    Ranks divide the heads, and the values within the MLP.
    """

    def __init__(self, table: gpt.GPT, name: str, policy: str):
        super().__init__(name=name, dtype=policy)
        attn, self.mlp = (LayerParts(adapter, table.tensor, f"{name}.{part}") for part in ("attn", "mlp"))
        self.attn, self.width, self.recompute = attn, table.width, table.recompute
        self.heads, self.size, self.inner = (
            table.heads // attn.size,
            table.width // table.heads,
            4 * table.width // attn.size,
        )
        self.ln_1 = layers.LayerNormalization(epsilon=table.norm_epsilon, name="ln_1", dtype=policy)
        self.c_attn = Linear(3 * self.heads * self.size, "attn.c_attn", policy)
        self.attn_proj = Linear(self.width, "attn.c_proj", policy, attn)
        self.ln_2 = layers.LayerNormalization(epsilon=table.norm_epsilon, name="ln_2", dtype=policy)
        self.c_fc = Linear(self.inner, "mlp.c_fc", policy)
        self.mlp_proj = Linear(self.width, "mlp.c_proj", policy, self.mlp)

    def build(self, shape):
        for layer in (self.ln_1, self.c_attn, self.ln_2, self.c_fc):
            layer.build((None, None, self.width))
        self.attn_proj.build((None, None, self.heads * self.size))
        self.mlp_proj.build((None, None, self.inner))

    def compute_output_shape(self, shape):  # else Keras computes a block, with its sums over ranks, to know it
        return shape

    def call(self, x, training=None):
        return (keras.remat(self.compute) if self.recompute and training else self.compute)(x)

    def compute(self, x):
        """The block's output; with `recompute`, it is computed again in backward."""
        tokens, values = ops.shape(x)[1], self.c_attn(self.attn.enter(self.ln_1(x)))
        q, k, v = ops.unstack(ops.reshape(values, (-1, tokens, 3, self.heads, self.size)), axis=2)
        # The function's own scale is a float32 always.
        y = ops.dot_product_attention(q * self.size**-0.5, k, v, scale=1.0, is_causal=True)
        x = x + self.attn_proj(ops.reshape(y, (-1, tokens, self.heads * self.size)))
        return x + self.mlp_proj(gelu(self.c_fc(self.mlp.enter(self.ln_2(x)))))


class Tokens(layers.ReversibleEmbedding):
    """The vectors of tokens, and the output layer. Ranks divide the vocabulary."""

    def __init__(self, table: gpt.GPT, policy: str):
        self.parts = LayerParts(adapter, table.tensor, "transformer.wte")
        self.first, stop = table.vocabulary_part
        sizes = stop - self.first, table.width
        super().__init__(*sizes, reverse_dtype=table.dtype, name="transformer.wte", dtype=policy)

    def call(self, inputs, reverse=False):
        if reverse:
            return super().call(self.parts.enter(inputs), reverse=True)
        if not self.parts.group:
            return super().call(inputs)
        own = inputs - self.first
        here = ops.logical_and(own >= 0, own < self.input_dim)
        rows = super().call(ops.where(here, own, ops.zeros_like(own)))
        return self.parts.leave(rows * ops.expand_dims(ops.cast(here, rows.dtype), -1))


class Positions(layers.Layer):
    """Adds a position's vector to each token's."""

    def __init__(self, table: gpt.GPT, policy: str):
        super().__init__(name="transformer.wpe", dtype=policy)
        self.shape = table.context, table.width

    def build(self, shape):
        self.weight = self.add_weight(self.shape, "zeros", name="weight")

    def call(self, x):
        return x + self.weight[: ops.shape(x)[1]]


def build(table: gpt.GPT) -> keras.Model:
    """A model from tokens (n, t) to logits (n, t, vocabulary); between two stages of a pipeline are vectors
    (n, t, width)."""
    policy, here = POLICIES.get(table.compute_dtype, table.dtype), table.here
    wte = Tokens(table, policy)
    if here.is_first:
        inputs = keras.Input((None,), dtype="int64")
        x = Positions(table, policy)(wte(inputs))
    else:
        x = inputs = keras.Input((None, table.width), dtype=table.dtype)
    for name in table.blocks:
        x = Block(table, name, policy)(x)
    if here.is_last:
        x = layers.LayerNormalization(epsilon=table.norm_epsilon, name="transformer.ln_f", dtype=table.dtype)(x)
        x = wte(x, reverse=True)
    model = keras.Model(inputs, x, name=table.name)
    model.transposed = False  # its matrices are (in, out), as in GPT-2's files
    if table.tensor:
        from hvdkit.adapters.tensorflow.parts import DividedOutputs

        model.divided_outputs = DividedOutputs(adapter, table.tensor, wte.first, table.vocabulary)
    return model


if __name__ == "__main__":
    main(adapter, build, sys.argv[1:])
