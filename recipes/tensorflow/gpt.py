"""GPT-2 in plain TensorFlow.

    horovodrun -np 2 python recipes/tensorflow/gpt.py recipes/gpt-tiny.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import math
import sys

from hvdkit.adapters import tensorflow
from hvdkit.adapters.parts import LayerParts
from hvdkit.adapters.tensorflow.recompute import recomputed
from hvdkit.tasks import gpt
from hvdkit.worker.entry import main

import tensorflow as tf  # isort: skip  # after the adapter, which silences TensorFlow's start-up messages


def gelu(x: tf.Tensor) -> tf.Tensor:
    """GELU in its tanh form; the constants of `tf.nn.gelu` are float32 always."""
    return 0.5 * x * (1 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class Linear(tf.Module):
    """A linear layer in the dtype of its input.

    With `parts` it has some of the rows of a matrix. The products of all ranks are added up, and then the bias.
    """

    def __init__(self, name: str, inputs: int, outputs: int, dtype: str, parts: LayerParts | None = None) -> None:
        self.parts = parts
        self.weight = tf.Variable(tf.zeros((inputs, outputs), dtype), name=f"{name}.weight")
        self.bias = tf.Variable(tf.zeros(outputs, dtype), name=f"{name}.bias")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        # One product of matrices: of a batch of them, TensorFlow would compute each on its own.
        rows = tf.reshape(x, [-1, self.weight.shape[0]])
        y = rows @ tf.cast(self.weight, x.dtype)
        y = tf.nn.bias_add(self.parts.leave(y) if self.parts else y, tf.cast(self.bias, x.dtype))
        return tf.reshape(y, [tf.shape(x)[0], -1, self.weight.shape[1]])


class LayerNorm(tf.Module):
    """Layer norm in the parameters' dtype; the result has the dtype of the input."""

    def __init__(self, name: str, table: gpt.GPT) -> None:
        self.weight = tf.Variable(tf.ones(table.width, table.dtype), name=f"{name}.weight")
        self.bias = tf.Variable(tf.zeros(table.width, table.dtype), name=f"{name}.bias")
        self.epsilon = table.norm_epsilon

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(x, self.weight.dtype)
        mean, variance = tf.nn.moments(wide, [-1], keepdims=True)
        normal = tf.nn.batch_normalization(wide, mean, variance, self.bias, self.weight, self.epsilon)
        return tf.cast(normal, x.dtype)


class Attention(tf.Module):
    """Causal self-attention: a token sees itself and those before it. Ranks divide its heads."""

    def __init__(self, name: str, table: gpt.GPT) -> None:
        self.parts = LayerParts(tensorflow, table.tensor, name)
        self.heads, self.width = table.heads // self.parts.size, table.width // self.parts.size
        self.c_attn = Linear(f"{name}.c_attn", table.width, 3 * self.width, table.dtype)
        self.c_proj = Linear(f"{name}.c_proj", self.width, table.width, table.dtype, self.parts)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        tokens, size = tf.shape(x)[1], self.width // self.heads
        values = tf.reshape(self.c_attn(self.parts.enter(x)), [-1, tokens, 3, self.heads, size])
        q, k, v = tf.unstack(tf.transpose(values, [2, 0, 3, 1, 4]))
        scores = tf.matmul(q, k, transpose_b=True) * size**-0.5
        seen = tf.range(tokens)[:, None] >= tf.range(tokens)
        y = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min)) @ v
        return self.c_proj(tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [-1, tokens, self.width]))


class Block(tf.Module):
    """Attention and MLP, each after a layer norm, and each added to its input. Ranks divide the MLP's inner values."""

    def __init__(self, name: str, table: gpt.GPT) -> None:
        self.parts = LayerParts(tensorflow, table.tensor, f"{name}.mlp")
        inner = 4 * table.width // self.parts.size
        self.recompute = table.recompute
        self.ln_1, self.ln_2 = LayerNorm(f"{name}.ln_1", table), LayerNorm(f"{name}.ln_2", table)
        self.attn = Attention(f"{name}.attn", table)
        self.c_fc = Linear(f"{name}.mlp.c_fc", table.width, inner, table.dtype)
        self.c_proj = Linear(f"{name}.mlp.c_proj", inner, table.width, table.dtype, self.parts)

    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        return (recomputed(self.compute) if self.recompute and training else self.compute)(x)

    def compute(self, x: tf.Tensor) -> tf.Tensor:
        """The block's output; with `recompute`, it is computed again in backward."""
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(gelu(self.c_fc(self.parts.enter(self.ln_2(x)))))


class GPT(tf.Module):
    """A model from tokens (n, t) to logits (n, t, vocabulary). Ranks divide the vocabulary.

    Between two stages of a pipeline are vectors (n, t, width).
    """

    transposed = False  # its matrices are (in, out), as in GPT-2's files

    def __init__(self, table: gpt.GPT) -> None:
        self.here, self.compute_dtype, dtype = table.here, table.compute_dtype, table.dtype
        self.parts = LayerParts(tensorflow, table.tensor, "transformer.wte")
        self.first, stop = table.vocabulary_part
        if table.tensor:
            from hvdkit.adapters.tensorflow.parts import DividedOutputs

            self.divided_outputs = DividedOutputs(tensorflow, table.tensor, self.first, table.vocabulary)
        if self.here.is_first or self.here.is_last:
            self.wte = tf.Variable(tf.zeros((stop - self.first, table.width), dtype), name="transformer.wte.weight")
        if self.here.is_first:
            self.wpe = tf.Variable(tf.zeros((table.context, table.width), dtype), name="transformer.wpe.weight")
        self.blocks = [Block(name, table) for name in table.blocks]
        if self.here.is_last:
            self.ln_f = LayerNorm("transformer.ln_f", table)

    @tf.autograph.experimental.do_not_convert  # nothing to convert here, and the search takes a second or more
    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        if self.here.is_first:
            x = self.embedded(x) + self.wpe[: tf.shape(x)[1]]
        x = tf.cast(x, self.compute_dtype)
        for block in self.blocks:
            x = block(x, training)
        return self.logits(x) if self.here.is_last else x

    def logits(self, x: tf.Tensor) -> tf.Tensor:
        """Of the tokens after each, from the last block's outputs."""
        rows = tf.reshape(self.parts.enter(self.ln_f(x)), [-1, self.wte.shape[1]])
        logits = tf.matmul(rows, tf.cast(self.wte, x.dtype), transpose_b=True)
        return tf.reshape(logits, [tf.shape(x)[0], -1, self.wte.shape[0]])

    def embedded(self, tokens: tf.Tensor) -> tf.Tensor:
        """The vectors of the tokens. A rank adds nothing for tokens whose vectors another one has."""
        if not self.parts.group:
            return tf.gather(self.wte, tokens)
        own = tokens - self.first
        here = (own >= 0) & (own < self.wte.shape[0])
        rows = tf.gather(self.wte, tf.where(here, own, tf.zeros_like(own)))
        return self.parts.leave(rows * tf.cast(here, rows.dtype)[..., None])


build = GPT

if __name__ == "__main__":
    main(tensorflow, build, sys.argv[1:])
