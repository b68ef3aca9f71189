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


class BatchNorm(nn.BatchNorm):
    """A batch norm whose running variance is unbiased, as in PyTorch; MXNet's own is biased.

    With momentum 0 the operation leaves the batch's own statistics in its buffers; `after_step` turns them into
    running ones.
    """

    def __init__(self, row: resnet.Conv) -> None:
        super().__init__(momentum=0, epsilon=resnet.BN_EPSILON, in_channels=row.outputs)

    def before_step(self) -> None:
        self.kept = self.running_mean.data().copy(), self.running_var.data().copy()

    def after_step(self, values: int) -> None:
        """`values` is how many values the batch has in a channel."""
        keep, mean, variance = resnet.BN_MOMENTUM, self.running_mean.data(), self.running_var.data()
        mean[:] = keep * self.kept[0] + (1 - keep) * mean
        variance[:] = keep * self.kept[1] + (1 - keep) * values / (values - 1) * variance


def convolution(row: resnet.Conv) -> nn.Conv2D:
    return nn.Conv2D(row.outputs, row.kernel, row.stride, row.padding, use_bias=False, in_channels=row.inputs)


class Block(nn.HybridBlock):
    def __init__(self, row: resnet.Block) -> None:
        super().__init__()
        for conv in row.convs:
            setattr(self, conv.name, convolution(conv))
            setattr(self, conv.norm, BatchNorm(conv))
        self.pairs = [(conv.name, conv.norm) for conv in row.convs]
        self.downsample = nn.HybridSequential()
        if row.projection:
            self.downsample.add(convolution(row.projection), BatchNorm(row.projection))

    def hybrid_forward(self, F, x):
        y = x
        for index, (conv, norm) in enumerate(self.pairs):
            y = getattr(self, norm)(getattr(self, conv)(F.relu(y) if index else y))
        return F.relu(y + self.downsample(x))


class ResNet(nn.HybridBlock):
    def __init__(self, table: resnet.ResNet) -> None:
        super().__init__()
        self.conv1 = convolution(table.stem)
        self.bn1 = BatchNorm(table.stem)
        self.maxpool = nn.MaxPool2D(3, 2, 1) if table.max_pool else None
        stages: dict[str, nn.HybridSequential] = {}
        for row in table.blocks:
            stages.setdefault(row.name.split(".")[0], nn.HybridSequential()).add(Block(row))
        for name, blocks in stages.items():
            setattr(self, name, blocks)
        self.stages = list(stages)
        self.fc = nn.Dense(table.classes, in_units=table.features)
        self.counts: dict[str, int] = {}

    def hybrid_forward(self, F, x):
        x = F.relu(self.bn1(self.conv1(x)))
        if self.maxpool:
            x = self.maxpool(x)
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(F.mean(x, axis=(2, 3)))

    def before_step(self, images: mx.nd.NDArray) -> None:
        if not self.counts:
            self._count(images.shape)
        self.apply(lambda block: block.before_step() if isinstance(block, BatchNorm) else None)

    def after_step(self) -> None:
        self.apply(lambda block: block.after_step(self.counts[block.name]) if isinstance(block, BatchNorm) else None)

    def _count(self, shape: tuple[int, ...]) -> None:
        """How many values a batch of images of `shape` has in one channel of each batch norm."""
        inside = self(mx.sym.var("images")).get_internals()
        _, shapes, _ = inside.infer_shape(images=shape)
        suffix = "_fwd_output"
        for output, size in zip(inside.list_outputs(), shapes, strict=True):
            if output.endswith(suffix) and len(size) == 4:
                self.counts[output.removesuffix(suffix)] = size[0] * size[2] * size[3]


build = ResNet

if __name__ == "__main__":
    sys.exit(main(mxnet, build, sys.argv[1:]))
