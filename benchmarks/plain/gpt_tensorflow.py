"""A small GPT in TensorFlow by hand: what hvdkit is measured against (`make bench`).

python benchmarks/plain/gpt_tensorflow.py
horovodrun -np 2 python benchmarks/plain/gpt_tensorflow.py --horovod
"""

import keras
import shared
import tensorflow as tf

hvd = shared.horovod("horovod.tensorflow")


class Linear(tf.Module):
    def __init__(self, inputs, outputs, deviation=0.02):
        self.weight = tf.Variable(tf.random.normal((inputs, outputs), stddev=deviation), name="kernel")
        self.bias = tf.Variable(tf.zeros(outputs), name="bias")

    def __call__(self, x):
        rows = tf.reshape(x, [-1, x.shape[-1]])
        return tf.reshape(tf.nn.bias_add(rows @ self.weight, self.bias), [*x.shape[:-1], self.bias.shape[0]])


class LayerNorm(tf.Module):
    def __init__(self, width):
        self.gain = tf.Variable(tf.ones(width), name="gain")
        self.bias = tf.Variable(tf.zeros(width), name="bias")

    def __call__(self, x):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, self.bias, self.gain, 1e-5)


class Block(tf.Module):
    def __init__(self, args):
        width, share = args.width, 0.02 / (2 * args.layers) ** 0.5
        self.heads = args.heads
        self.ln_1, self.ln_2 = LayerNorm(width), LayerNorm(width)
        self.c_attn, self.attn_proj = Linear(width, 3 * width), Linear(width, width, share)
        self.c_fc, self.mlp_proj = Linear(width, 4 * width), Linear(4 * width, width, share)

    def __call__(self, x, mask):
        n, t, width = x.shape
        parts = tf.reshape(self.c_attn(self.ln_1(x)), [n, t, 3, self.heads, width // self.heads])
        q, k, v = tf.unstack(tf.transpose(parts, [2, 0, 3, 1, 4]))
        scores = tf.matmul(q, k, transpose_b=True) * (width // self.heads) ** -0.5
        y = tf.nn.softmax(tf.where(mask, scores, scores.dtype.min)) @ v
        x = x + self.attn_proj(tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [n, t, width]))
        return x + self.mlp_proj(tf.nn.gelu(self.c_fc(self.ln_2(x)), approximate=True))


class GPT(tf.Module):
    def __init__(self, args):
        self.wte = tf.Variable(tf.random.normal((args.vocabulary, args.width), stddev=0.02), name="wte")
        self.wpe = tf.Variable(tf.random.normal((args.context, args.width), stddev=0.02), name="wpe")
        self.blocks = [Block(args) for _ in range(args.layers)]
        self.ln_f = LayerNorm(args.width)
        self.mask = tf.linalg.band_part(tf.ones((args.context, args.context), tf.bool), -1, 0)

    def __call__(self, tokens):
        x = tf.gather(self.wte, tokens) + self.wpe
        for block in self.blocks:
            x = block(x, self.mask)
        rows = tf.reshape(self.ln_f(x), [-1, x.shape[-1]])
        return tf.matmul(rows, self.wte, transpose_b=True)


def main():
    args = shared.text_options()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    tf.random.set_seed(1)
    model = GPT(args)
    variables = model.trainable_variables
    optimizer = keras.optimizers.AdamW(
        shared.RATE, weight_decay=shared.DECAY, beta_1=shared.BETAS[0], beta_2=shared.BETAS[1], epsilon=1e-8
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gain"])
    optimizer.build(variables)

    shape = [args.batch_size, args.context]

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.int64)] * 2)
    def train_step(tokens, following):
        with tf.GradientTape() as tape:
            logits = model(tokens)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(following, [-1]), logits)
            loss = tf.reduce_mean(losses)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        gradients, _ = tf.clip_by_global_norm(gradients, shared.CLIP)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def step(tokens, following, rate):
        optimizer.learning_rate.assign(rate)
        return float(train_step(tf.constant(tokens), tf.constant(following)))

    hvd.broadcast_variables([*variables, *(each.value for each in optimizer.variables)], root_rank=0)
    shared.train_text(args, hvd, step)


if __name__ == "__main__":
    main()
