"""ResNet in PyTorch.

    horovodrun -np 2 python recipes/pytorch/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    import hvdkit.worker.startup  # noqa: F401 - before the framework, whose start-up it makes faster

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint

from hvdkit.adapters import pytorch
from hvdkit.adapters.pytorch.batch_norm import BatchNorm2d
from hvdkit.tasks import resnet
from hvdkit.worker.entry import main


def convolution(row: resnet.Conv) -> nn.Conv2d:
    return nn.Conv2d(row.inputs, row.outputs, row.kernel, row.stride, row.padding, bias=False)


def batch_norm(row: resnet.Conv) -> nn.BatchNorm2d:
    return BatchNorm2d(row.outputs, eps=resnet.BN_EPSILON, momentum=1 - resnet.BN_MOMENTUM)


class Block(nn.Module):
    """The residual block of a table row: ReLU after each sum and between convolutions."""

    def __init__(self, row: resnet.Block, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        for conv in row.convs:
            self.add_module(conv.name, convolution(conv))
            self.add_module(conv.norm, batch_norm(conv))
        self.pairs = [(conv.name, conv.norm) for conv in row.convs]
        self.downsample = (
            nn.Sequential(convolution(row.projection), batch_norm(row.projection)) if row.projection else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        if not (self.recompute and self.training):
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=False, context_fn=self.contexts)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of the first and the second forward pass of a batch, for `torch.utils.checkpoint`."""
        return nullcontext(), self.statistics_kept()

    @contextmanager
    def statistics_kept(self) -> Iterator[None]:
        """A context that leaves the running statistics unchanged, for the second forward pass of a batch."""
        norms = [module for module in self.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 0.0
        try:
            yield
        finally:  # PyTorch ends the second pass by an exception once it has what backward needs
            for norm in norms:
                norm.momentum = 1 - resnet.BN_MOMENTUM

    def compute(self, x: Tensor) -> Tensor:
        """The block's output; with `recompute`, it is computed again in backward."""
        y = x
        for conv, norm in self.pairs:
            y = getattr(self, norm)(getattr(self, conv)(y if y is x else relu(y)))
        return relu(y + self.downsample(x))


class ResNet(nn.Module):
    """A model from images (n, channels, height, width) to logits (n, classes)."""

    def __init__(self, table: resnet.ResNet) -> None:
        super().__init__()
        self.conv1 = convolution(table.stem)
        self.bn1 = batch_norm(table.stem)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if table.max_pool else nn.Identity()
        stages: dict[str, list[Block]] = {}
        for row in table.blocks:
            stages.setdefault(row.name.split(".")[0], []).append(Block(row, table.recompute))
        self.stages = list(stages)
        for name, blocks in stages.items():
            self.add_module(name, nn.Sequential(*blocks))
        self.fc = nn.Linear(table.features, table.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(x.mean(dim=(2, 3)))


build = ResNet

if __name__ == "__main__":
    main(pytorch, build, sys.argv[1:])
