"""A small GPT in MXNet's Gluon by hand: what hvdkit is measured against (`make bench`).

python benchmarks/plain/gpt_mxnet.py
horovodrun -np 2 python benchmarks/plain/gpt_mxnet.py --horovod
"""

import mxnet as mx
import shared
from mxnet import autograd, gluon
from mxnet.gluon import nn

hvd = shared.horovod("horovod.mxnet")


@mx.optimizer.register
class AdamW(mx.optimizer.Optimizer):
    """MXNet 1 has the kernel, but no optimizer of that name; GluonNLP's BERTAdam calls it like this."""

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape, weight.context), mx.nd.zeros(weight.shape, weight.context)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        rate, decay, number = self._get_lr(index), self._get_wd(index), self._index_update_count[index]
        (first, second), (mean, square) = shared.BETAS, state
        root = (1 - second**number) ** 0.5
        mx.nd.contrib.adamw_update(
            weight, grad, mean, square, mx.nd.array([self.rescale_grad]), out=weight,
            lr=rate * root / (1 - first**number), wd=rate * decay, eta=1.0,
            beta1=first, beta2=second, epsilon=1e-8 * root,
        )  # fmt: skip


class Block(nn.HybridBlock):
    def __init__(self, args):
        super().__init__()
        width, share = args.width, mx.init.Normal(0.02 / (2 * args.layers) ** 0.5)
        self.heads, self.width = args.heads, width
        self.ln_1, self.ln_2 = nn.LayerNorm(in_channels=width), nn.LayerNorm(in_channels=width)
        self.c_attn = nn.Dense(3 * width, flatten=False, in_units=width)
        self.attn_proj = nn.Dense(width, flatten=False, in_units=width, weight_initializer=share)
        self.c_fc = nn.Dense(4 * width, flatten=False, in_units=width)
        self.mlp_proj = nn.Dense(width, flatten=False, in_units=4 * width, weight_initializer=share)

    def hybrid_forward(self, F, x, mask):
        q, k, v = self.c_attn(self.ln_1(x)).reshape((0, 0, 3 * self.heads, -1)).transpose((0, 2, 1, 3)).split(3)
        scores = F.linalg.gemm2(q, k, transpose_b=True, alpha=(self.width // self.heads) ** -0.5)
        y = F.linalg.gemm2(F.softmax(F.broadcast_add(scores, mask)), v)
        x = x + self.attn_proj(y.transpose((0, 2, 1, 3)).reshape((0, 0, -3)))
        h = self.c_fc(self.ln_2(x))
        h = 0.5 * h * (1 + F.tanh(0.7978845608 * (h + 0.044715 * h**3)))
        return x + self.mlp_proj(h)


class GPT(nn.HybridBlock):
    def __init__(self, args):
        super().__init__()
        self.vocabulary, self.width = args.vocabulary, args.width
        self.wte = self.params.get("wte", shape=(args.vocabulary, args.width))
        self.wpe = self.params.get("wpe", shape=(1, args.context, args.width))
        places = mx.nd.arange(args.context)
        later = (places.reshape((-1, 1)) < places.reshape((1, -1))) * -1e9
        self.mask = self.params.get_constant("mask", later.reshape((1, 1, args.context, args.context)))
        self.blocks = [Block(args) for _ in range(args.layers)]
        for block in self.blocks:
            self.register_child(block)
        self.ln_f = nn.LayerNorm(in_channels=args.width)

    def hybrid_forward(self, F, tokens, wte, wpe, mask):
        x = F.Embedding(tokens, wte, input_dim=self.vocabulary, output_dim=self.width)
        x = F.broadcast_add(x, wpe)
        for block in self.blocks:
            x = block(x, mask)
        return F.FullyConnected(self.ln_f(x), wte, num_hidden=self.vocabulary, no_bias=True, flatten=False)


def main():
    args = shared.text_options()
    hvd.init()
    mx.random.seed(1)
    net = GPT(args)
    net.initialize(mx.init.Normal(0.02))
    net.hybridize(static_alloc=True, static_shape=True)
    params = net.collect_params()
    for name, each in params.items():
        each.wd_mult = 1.0 if name.endswith(("weight", "wte", "wpe")) else 0.0
    settings = {"learning_rate": shared.RATE, "wd": shared.DECAY}
    trainer = (hvd.DistributedTrainer if args.horovod else gluon.Trainer)(params, "adamw", settings)
    hvd.broadcast_parameters(params, root_rank=0)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()
    trained = [each for each in params.values() if each.grad_req != "null"]

    def step(tokens, following, rate):
        trainer.set_learning_rate(rate)
        with autograd.record():
            logits = net(mx.nd.array(tokens, dtype="int32"))
            loss = criterion(logits, mx.nd.array(following, dtype="int32")).mean()
        loss.backward()
        trainer.allreduce_grads()  # Horovod's sums
        gluon.utils.clip_global_norm([each.grad() for each in trained], shared.CLIP * hvd.size())
        trainer.update(1)
        return float(loss.asscalar())

    shared.train_text(args, hvd, step)


if __name__ == "__main__":
    main()
