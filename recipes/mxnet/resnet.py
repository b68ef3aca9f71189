"""ResNet in MXNet's Gluon.

    horovodrun -np 2 python recipes/mxnet/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import sys

from hvdkit.adapters import mxnet
from hvdkit.adapters.mxnet.batch_norm import BatchNorm
from hvdkit.tasks import resnet
from hvdkit.worker.entry import main

from mxnet.gluon import nn  # isort: skip  # after the adapter, which makes MXNet's start-up faster


def batch_norm(row: resnet.Conv) -> nn.BatchNorm:
    return BatchNorm(row.outputs, resnet.BN_MOMENTUM, resnet.BN_EPSILON)


def convolution(row: resnet.Conv) -> nn.Conv2D:
    return nn.Conv2D(row.outputs, row.kernel, row.stride, row.padding, use_bias=False, in_channels=row.inputs)


def relu(F, x):
    """ReLU that keeps oneDNN's layout; F.relu would copy the tensor, in backward too."""
    return F.Activation(x, act_type="relu")


class Block(nn.HybridBlock):
    """The residual block of a table row: ReLU after each sum and between convolutions."""

    def __init__(self, row: resnet.ResidualBlock) -> None:
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
    """A model from images (n, channels, height, width) to logits (n, classes).

    Between two stages of a pipeline are features like images.
    """

    def __init__(self, table: resnet.ResNet) -> None:
        super().__init__()
        self.is_first, self.is_last = table.is_first, table.is_last
        if self.is_first:
            self.conv1 = convolution(table.stem)
            self.bn1 = batch_norm(table.stem)
            self.maxpool = nn.MaxPool2D(3, 2, 1) if table.max_pool else None
        stages: dict[str, nn.HybridSequential] = {}
        for row in table.own_blocks:
            name, number = row.name.split(".")
            stages.setdefault(name, nn.HybridSequential()).register_child(Block(row), number)
        for name, blocks in stages.items():
            setattr(self, name, blocks)
        self.stages = list(stages)
        if self.is_last:
            self.fc = nn.Dense(table.classes, in_units=table.features)

    def hybrid_forward(self, F, x):
        if self.is_first:
            x = relu(F, self.bn1(self.conv1(x)))
            x = self.maxpool(x) if self.maxpool else x
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(F.mean(x, axis=(2, 3))) if self.is_last else x


build = ResNet

if __name__ == "__main__":
    main(mxnet, build, sys.argv[1:])
