"""A small GPT in Keras 3 by hand, from its own layers: what hvdkit is measured against (`make bench`).

python benchmarks/plain/gpt_keras.py
horovodrun -np 2 python benchmarks/plain/gpt_keras.py --horovod

Horovod's own Keras front end does not work under Keras 3, so the optimizer averages the gradients by
horovod.tensorflow.
"""

import keras
import numpy as np
import shared
import tensorflow as tf
from keras import layers, ops

hvd = shared.horovod("horovod.tensorflow")


class Embedding(layers.Layer):
    """The vectors of tokens and positions; the same table gives the logits."""

    def __init__(self, args):
        super().__init__()
        self.tokens = layers.Embedding(args.vocabulary, args.width, keras.initializers.RandomNormal(stddev=0.02))
        self.places = layers.Embedding(args.context, args.width, keras.initializers.RandomNormal(stddev=0.02))
        self.context = args.context

    def call(self, x, reverse=False):
        if reverse:
            return ops.matmul(x, ops.transpose(self.tokens.embeddings))
        return self.tokens(x) + self.places(ops.arange(self.context))


def block(args, x):
    def linear(outputs, share=1.0, activation=None):
        start = keras.initializers.RandomNormal(stddev=0.02 * share)
        return layers.Dense(outputs, activation, kernel_initializer=start)

    share = (2 * args.layers) ** -0.5
    attention = layers.MultiHeadAttention(args.heads, args.width // args.heads)
    y = layers.LayerNormalization(epsilon=1e-5)(x)
    x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
    y = linear(4 * args.width, activation="gelu")(layers.LayerNormalization(epsilon=1e-5)(x))
    return layers.Add()([x, linear(args.width, share)(y)])


class Clock(keras.callbacks.Callback):
    """The rate of each step, and its time."""

    def __init__(self, args):
        super().__init__()
        self.args, self.clock, self.step, self.loss = args, shared.Clock(), 0, 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate.assign(shared.text_rate(self.step, self.args.steps))

    def on_train_batch_end(self, batch, logs=None):
        self.loss = logs["loss"]
        self.step += 1
        self.clock.tick()


def main():
    args = shared.text_options()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    keras.utils.set_random_seed(1)

    class AdamW(keras.optimizers.AdamW):
        """On gradients averaged over all ranks, if there are several."""

        def apply(self, grads, trainable_variables=None):
            if args.horovod:
                grads = [tf.convert_to_tensor(each) for each in grads]
                grads = hvd.grouped_allreduce(grads, op=hvd.Average, name="gradients")
            return super().apply(grads, trainable_variables)

    tokens = keras.Input((args.context,), dtype="int64")
    embedding = Embedding(args)
    x = embedding(tokens)
    for _ in range(args.layers):
        x = block(args, x)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    model = keras.Model(tokens, embedding(x, reverse=True))
    optimizer = AdamW(
        shared.RATE,
        weight_decay=shared.DECAY,
        beta_1=shared.BETAS[0],
        beta_2=shared.BETAS[1],
        epsilon=1e-8,
        global_clipnorm=shared.CLIP,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Keras would compile by XLA, which Horovod's operations do not know here.
    model.compile(optimizer, loss, jit_compile=False if args.horovod else "auto")
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([each.value for each in [*model.variables, *optimizer.variables]], root_rank=0)

    drawn = shared.Text(args, hvd.rank())
    callback = Clock(args)

    def batches():
        while True:
            inputs, targets = drawn.batch()
            yield np.ascontiguousarray(inputs), np.ascontiguousarray(targets)

    model.fit(batches(), steps_per_epoch=args.steps, verbose=0, callbacks=[callback])
    shared.report_text(args, hvd, callback.clock, callback.loss)


if __name__ == "__main__":
    main()
