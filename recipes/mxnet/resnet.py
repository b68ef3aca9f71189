"""ResNet in MXNet's Gluon.

    horovodrun -np 2 python recipes/mxnet/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

import sys

import mxnet as mx
from mxnet.gluon import nn

from hvdkit.adapters import mxnet
from hvdkit.core import resnet
from hvdkit.core.main import main


def batch_norm(row: resnet.Conv) -> nn.BatchNorm:
    return nn.BatchNorm(momentum=resnet.BN_MOMENTUM, epsilon=resnet.BN_EPSILON, in_channels=row.outputs)


def convolution(row: resnet.Conv) -> nn.Conv2D:
    return nn.Conv2D(row.outputs, row.kernel, row.stride, row.padding, use_bias=False, in_channels=row.inputs)


def relu(F, x):
    """F.relu would leave oneDNN's layout, at the price of a copy each time, backward too."""
    return F.Activation(x, act_type="relu")


class Block(nn.HybridBlock):
    def __init__(self, row: resnet.Block) -> None:
        super().__init__()
        for conv in row.convs:
            setattr(self, conv.name, convolution(conv))
            setattr(self, conv.norm, batch_norm(conv))
        self.pairs = [(conv.name, conv.norm) for conv in row.convs]
        self.downsample = nn.HybridSequential()
        if row.projection:
            self.downsample.add(convolution(row.projection), batch_norm(row.projection))

    def hybrid_forward(self, F, x):
        y = x
        for index, (conv, norm) in enumerate(self.pairs):
            y = getattr(self, norm)(getattr(self, conv)(relu(F, y) if index else y))
        return relu(F, y + self.downsample(x))


class ResNet(nn.HybridBlock):
    def __init__(self, table: resnet.ResNet) -> None:
        super().__init__()
        self.conv1 = convolution(table.stem)
        self.bn1 = batch_norm(table.stem)
        self.maxpool = nn.MaxPool2D(3, 2, 1) if table.max_pool else None
        stages: dict[str, nn.HybridSequential] = {}
        for row in table.blocks:
            stages.setdefault(row.name.split(".")[0], nn.HybridSequential()).add(Block(row))
        for name, blocks in stages.items():
            setattr(self, name, blocks)
        self.stages = list(stages)
        self.fc = nn.Dense(table.classes, in_units=table.features)
        self.corrections: UnbiasedVariances | None = None

    def hybrid_forward(self, F, x):
        x = relu(F, self.bn1(self.conv1(x)))
        if self.maxpool:
            x = self.maxpool(x)
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(F.mean(x, axis=(2, 3)))

    def before_step(self, images: mx.nd.NDArray) -> None:
        if self.corrections is None:
            self.corrections = UnbiasedVariances(self, images.shape)
        self.corrections.before_step()

    def after_step(self) -> None:
        self.corrections.after_step()


class UnbiasedVariances:
    """Makes the running variances unbiased, as in PyTorch; MXNet's own are biased.

    Where `keep` is BN_MOMENTUM and a channel has n values, MXNet computes  new = keep × old + (1 - keep) × biased,
    but (1 - keep) × n / (n - 1) × biased is wanted. With c = n / (n - 1) that is  c × new - keep × (c - 1) × old,
    here for all batch norms by one call of a kernel:  w - rate × (g + decay × w)  with new for w and old for g.
    """

    def __init__(self, network: ResNet, shape: tuple[int, ...]) -> None:
        """`shape` is that of a batch of images."""
        norms: dict[str, nn.BatchNorm] = {}
        network.apply(lambda block: norms.update({block.name: block}) if isinstance(block, nn.BatchNorm) else None)
        values = values_a_channel(network, shape)
        self.new = [norm.running_var.data() for norm in norms.values()]
        self.old = [variance.copy() for variance in self.new]
        self.rates = [resnet.BN_MOMENTUM / (values[name] - 1) for name in norms]

    def before_step(self) -> None:
        for new, old in zip(self.new, self.old, strict=True):
            new.copyto(old)

    def after_step(self) -> None:
        for start in range(0, len(self.new), 60):  # as many as the kernel takes
            new, old, rates = (each[start : start + 60] for each in (self.new, self.old, self.rates))
            pairs = [tensor for pair in zip(new, old, strict=True) for tensor in pair]
            decays = [-1 / resnet.BN_MOMENTUM] * len(new)
            mx.nd.multi_sgd_update(*pairs, lrs=rates, wds=decays, num_weights=len(new), out=new)


def values_a_channel(network: ResNet, shape: tuple[int, ...]) -> dict[str, int]:
    """How many values a batch of images of `shape` has in one channel of each layer, by the layer's name."""
    inside = network(mx.sym.var("images")).get_internals()
    _, shapes, _ = inside.infer_shape(images=shape)
    sizes = zip(inside.list_outputs(), shapes, strict=True)
    return {
        output.removesuffix("_fwd_output"): size[0] * size[2] * size[3]
        for output, size in sizes
        if output.endswith("_fwd_output") and len(size) == 4
    }


build = ResNet

if __name__ == "__main__":
    main(mxnet, build, sys.argv[1:])
