"""ResNet in MXNet's Gluon.

    horovodrun -np 2 python recipes/mxnet/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    import hvdkit.worker.startup  # noqa: F401 - before the framework, whose start it hastens

import sys

import mxnet as mx
from mxnet.gluon import nn

from hvdkit.adapters import mxnet
from hvdkit.tasks import resnet
from hvdkit.worker.entry import main


def batch_norm(row: resnet.Conv, momentum: float) -> nn.BatchNorm:
    return nn.BatchNorm(momentum=momentum, epsilon=resnet.BN_EPSILON, in_channels=row.outputs)


def convolution(row: resnet.Conv) -> nn.Conv2D:
    return nn.Conv2D(row.outputs, row.kernel, row.stride, row.padding, use_bias=False, in_channels=row.inputs)


def relu(F, x):
    """F.relu would leave oneDNN's layout, at the price of a copy each time, backward too."""
    return F.Activation(x, act_type="relu")


class Block(nn.HybridBlock):
    """A residual block by its row of the table: ReLU behind each sum and between convolutions."""

    def __init__(self, row: resnet.Block, momentum: float) -> None:
        super().__init__()
        for conv in row.convs:
            setattr(self, conv.name, convolution(conv))
            setattr(self, conv.norm, batch_norm(conv, momentum))
        self.pairs = [(conv.name, conv.norm) for conv in row.convs]
        self.downsample = nn.HybridSequential()
        if row.projection:
            self.downsample.add(convolution(row.projection), batch_norm(row.projection, momentum))

    def hybrid_forward(self, F, x):
        y = x
        for index, (conv, norm) in enumerate(self.pairs):
            y = getattr(self, norm)(getattr(self, conv)(relu(F, y) if index else y))
        return relu(F, y + self.downsample(x))


class ResNet(nn.HybridBlock):
    """Images (n, channels, height, width) to logits (n, classes); hvdkit calls the two hooks around each step."""

    def __init__(self, table: resnet.ResNet) -> None:
        super().__init__()
        self.statistics_of = ExactStatistics if table.dtype == "float64" else UnbiasedVariances
        self.statistics: dict[tuple[int, ...], Statistics] = {}  # by the shape of a batch of images
        momentum = self.statistics_of.MOMENTUM
        self.conv1 = convolution(table.stem)
        self.bn1 = batch_norm(table.stem, momentum)
        self.maxpool = nn.MaxPool2D(3, 2, 1) if table.max_pool else None
        stages: dict[str, nn.HybridSequential] = {}
        for row in table.blocks:
            stages.setdefault(row.name.split(".")[0], nn.HybridSequential()).add(Block(row, momentum))
        for name, blocks in stages.items():
            setattr(self, name, blocks)
        self.stages = list(stages)
        self.fc = nn.Dense(table.classes, in_units=table.features)

    def hybrid_forward(self, F, x):
        x = relu(F, self.bn1(self.conv1(x)))
        if self.maxpool:
            x = self.maxpool(x)
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(F.mean(x, axis=(2, 3)))

    def before_step(self, images: mx.nd.NDArray) -> None:
        """A training step of these images begins."""
        if images.shape not in self.statistics:
            self.statistics[images.shape] = self.statistics_of(self, images.shape)
        self.current = self.statistics[images.shape]
        self.current.before_step()

    def after_step(self) -> None:
        """It has ended, and the running statistics are put right."""
        self.current.after_step()


class Statistics:
    """Makes the running statistics what PyTorch's are; MXNet's own running variance is biased.

    `old` is what `running` was before the batch, `counts` are the values that the batch has in a channel.

    A static graph's backward changes the running statistics but tells MXNet's engine that it only reads them. So what
    reads them before has to be waited for, and what comes after has to write to them first.
    """

    MOMENTUM: float  # of MXNet's batch norms

    def __init__(self, network: ResNet, shape: tuple[int, ...]) -> None:
        """`shape` is that of a batch of images."""
        norms: dict[str, nn.BatchNorm] = {}
        network.apply(lambda block: norms.update({block.name: block}) if isinstance(block, nn.BatchNorm) else None)
        values = values_a_channel(network, shape)
        self.counts = [values[name] for name in norms]
        self.running = self.watched(list(norms.values()))
        self.old = [statistic.copy() for statistic in self.running]

    def watched(self, norms: list[nn.BatchNorm]) -> list[mx.nd.NDArray]:
        """Those that are put right."""
        return [norm.running_var.data() for norm in norms]

    def before_step(self) -> None:
        """Keep them as they are."""
        for new, old in zip(self.running, self.old, strict=True):
            new.copyto(old)
        for old in self.old:
            old.wait_to_read()


class UnbiasedVariances(Statistics):
    """Where `keep` is BN_MOMENTUM and a channel has n values, MXNet computes  new = keep × old + (1 - keep) × biased,
    but (1 - keep) × n / (n - 1) × biased is wanted. With c = n / (n - 1) that is  c × new - keep × (c - 1) × old,
    here for all batch norms by one call of a kernel:  w - rate × (g + decay × w)  with new for w and old for g.
    """

    MOMENTUM = resnet.BN_MOMENTUM

    def after_step(self) -> None:
        rates = [resnet.BN_MOMENTUM / (count - 1) for count in self.counts]
        for start in range(0, len(rates), 60):  # as many as the kernel takes
            new, old, some = (each[start : start + 60] for each in (self.running, self.old, rates))
            pairs = [tensor for pair in zip(new, old, strict=True) for tensor in pair]
            decays = [-1 / resnet.BN_MOMENTUM] * len(new)
            mx.nd.multi_sgd_update(*pairs, lrs=some, wds=decays, num_weights=len(new), out=new)


class ExactStatistics(Statistics):
    """For float64: to MXNet's batch norm and kernels 0.9 is 0.89999998.

    With a momentum of 0 the batch norms leave the batch's own mean and biased variance, and the rest is done here.
    """

    MOMENTUM = 0.0

    def watched(self, norms: list[nn.BatchNorm]) -> list[mx.nd.NDArray]:
        return super().watched(norms) + [norm.running_mean.data() for norm in norms]

    def after_step(self) -> None:
        factors = [count / (count - 1) for count in self.counts] + [1.0] * len(self.counts)
        for new, old, factor in zip(self.running, self.old, factors, strict=True):
            new *= (1 - resnet.BN_MOMENTUM) * factor
            new += resnet.BN_MOMENTUM * old


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
