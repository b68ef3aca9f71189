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
from hvdkit.tasks import gpt
from hvdkit.worker.entry import main

import tensorflow as tf  # isort: skip  # after the adapter, which silences TensorFlow's start-up messages


def gelu(x: tf.Tensor) -> tf.Tensor:
    """GELU in its tanh form; the constants of `tf.nn.gelu` are float32 always."""
    return 0.5 * x * (1 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class Linear(tf.Module):
    """A linear layer in the dtype of its input."""

    def __init__(self, name: str, inputs: int, outputs: int, dtype: str) -> None:
        self.weight = tf.Variable(tf.zeros((inputs, outputs), dtype), name=f"{name}.weight")
        self.bias = tf.Variable(tf.zeros(outputs, dtype), name=f"{name}.bias")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        # One product of matrices: of a batch of them, TensorFlow would compute each on its own.
        rows = tf.reshape(x, [-1, self.weight.shape[0]])
        y = tf.nn.bias_add(rows @ tf.cast(self.weight, x.dtype), tf.cast(self.bias, x.dtype))
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
    """Causal self-attention: a token sees itself and those before it."""

    def __init__(self, name: str, table: gpt.GPT) -> None:
        self.heads, self.width = table.heads, table.width
        self.c_attn = Linear(f"{name}.c_attn", table.width, 3 * table.width, table.dtype)
        self.c_proj = Linear(f"{name}.c_proj", table.width, table.width, table.dtype)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        tokens, size = tf.shape(x)[1], self.width // self.heads
        parts = tf.reshape(self.c_attn(x), [-1, tokens, 3, self.heads, size])
        q, k, v = tf.unstack(tf.transpose(parts, [2, 0, 3, 1, 4]))
        scores = tf.matmul(q, k, transpose_b=True) * size**-0.5
        seen = tf.range(tokens)[:, None] >= tf.range(tokens)
        y = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min)) @ v
        return self.c_proj(tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [-1, tokens, self.width]))


class Block(tf.Module):
    """Attention and MLP, each after a layer norm, and each added to its input."""

    def __init__(self, name: str, table: gpt.GPT) -> None:
        self.recompute = table.recompute
        self.ln_1, self.ln_2 = LayerNorm(f"{name}.ln_1", table), LayerNorm(f"{name}.ln_2", table)
        self.attn = Attention(f"{name}.attn", table)
        self.c_fc = Linear(f"{name}.mlp.c_fc", table.width, 4 * table.width, table.dtype)
        self.c_proj = Linear(f"{name}.mlp.c_proj", 4 * table.width, table.width, table.dtype)

    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        return (tf.recompute_grad(self.compute) if self.recompute and training else self.compute)(x)

    def compute(self, x: tf.Tensor) -> tf.Tensor:
        """The block's output; with `recompute`, it is computed again in backward."""
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(gelu(self.c_fc(self.ln_2(x))))


class GPT(tf.Module):
    """A model from tokens (n, t) to logits (n, t, vocabulary)."""

    transposed = False  # its matrices are (in, out), as in GPT-2's files

    def __init__(self, table: gpt.GPT) -> None:
        self.compute_dtype, dtype = table.compute_dtype, table.dtype
        self.wte = tf.Variable(tf.zeros((table.vocabulary, table.width), dtype), name="transformer.wte.weight")
        self.wpe = tf.Variable(tf.zeros((table.context, table.width), dtype), name="transformer.wpe.weight")
        self.blocks = [Block(name, table) for name in table.blocks]
        self.ln_f = LayerNorm("transformer.ln_f", table)

    @tf.autograph.experimental.do_not_convert  # nothing to convert here, and the search takes a second or more
    def __call__(self, tokens: tf.Tensor, training: bool) -> tf.Tensor:
        x = tf.gather(self.wte, tokens) + self.wpe[: tf.shape(tokens)[1]]
        x = tf.cast(x, self.compute_dtype)
        for block in self.blocks:
            x = block(x, training)
        rows = tf.reshape(self.ln_f(x), [-1, self.wte.shape[1]])
        logits = tf.matmul(rows, tf.cast(self.wte, x.dtype), transpose_b=True)
        return tf.reshape(logits, [tf.shape(tokens)[0], -1, self.wte.shape[0]])


build = GPT

if __name__ == "__main__":
    main(tensorflow, build, sys.argv[1:])
