"""ResNet in PyTorch.

    horovodrun -np 2 python recipes/pytorch/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too. `hvdkit export` copies this file beside the weights that it writes. Without
hvdkit, with PyTorch and safetensors alone, it loads them:

    from resnet import load
    model = load("model.safetensors")
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint


def convolution(row, of_inputs: int = 1, of_outputs: int = 1) -> nn.Conv2d:
    """A row of the table has inputs, outputs, kernel and stride; both sides are padded equally.

    One of several parts of its inputs or outputs may be asked for.
    """
    inputs, outputs = row.inputs // of_inputs, row.outputs // of_outputs
    return nn.Conv2d(inputs, outputs, row.kernel, row.stride, row.kernel // 2, bias=False)


class Block(nn.Module):
    """The residual block of a table row: ReLU after each sum and between convolutions.

    With `parts` ranks divide the channels between the first two convolutions.
    """

    def __init__(self, row, norm, recompute: bool, parts=None) -> None:
        super().__init__()
        self.recompute, self.parts = recompute, parts
        size = parts.size if parts else 1
        for number, conv in enumerate(row.convs):
            of_outputs = size if number == 0 else 1
            self.add_module(conv.name, convolution(conv, size if number == 1 else 1, of_outputs))
            self.add_module(conv.norm, norm(conv.outputs // of_outputs))
        self.pairs = [(conv.name, conv.norm) for conv in row.convs]
        self.downsample = (
            nn.Sequential(convolution(row.projection), norm(row.projection.outputs))
            if row.projection
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        if not (self.recompute and self.training):
            return self.compute(x)
        passes = nullcontext(), self.statistics_kept()  # the contexts of a batch's two forward passes
        return checkpoint(self.compute, x, use_reentrant=False, context_fn=lambda: passes)

    @contextmanager
    def statistics_kept(self) -> Iterator[None]:
        """A context that leaves the running statistics unchanged, for the second forward pass of a batch."""
        momenta = {norm: norm.momentum for norm in self.modules() if isinstance(norm, nn.BatchNorm2d)}
        for norm in momenta:
            norm.momentum = 0.0
        try:
            yield
        finally:  # PyTorch ends the second pass by an exception once it has what backward needs
            for norm, momentum in momenta.items():
                norm.momentum = momentum

    def compute(self, x: Tensor) -> Tensor:
        """The block's output; with `recompute`, it is computed again in backward."""
        y = self.parts.enter(x) if self.parts else x
        for number, (conv, norm) in enumerate(self.pairs):
            y = getattr(self, conv)(relu(y) if number else y)
            if self.parts and number == 1:
                y = self.parts.leave(y)
            y = getattr(self, norm)(y)
        return relu(y + self.downsample(x))


class ResNet(nn.Module):
    """A model from images (n, channels, height, width) to logits (n, classes), built from its table.

    With a `stage` in the table it is that stage of a pipeline: between two of them are features like images.
    """

    def __init__(self, table, norm_layer: type[nn.BatchNorm2d] = nn.BatchNorm2d, parts=lambda name: None) -> None:
        super().__init__()

        def norm(channels: int) -> nn.BatchNorm2d:  # the table has the share of a running statistic that is kept
            return norm_layer(channels, eps=table.norm_epsilon, momentum=1 - table.norm_momentum)

        stage = getattr(table, "stage", None)
        self.is_first, self.is_last = stage is None or stage.is_first, stage is None or stage.is_last
        if self.is_first:
            self.conv1 = convolution(table.stem)
            self.bn1 = norm(table.stem.outputs)
            self.maxpool = nn.MaxPool2d(3, 2, 1) if table.max_pool else nn.Identity()
        stages: dict[str, OrderedDict[str, Block]] = {}
        for row in table.blocks[stage.start : stage.stop] if stage else table.blocks:
            name, number = row.name.split(".")
            stages.setdefault(name, OrderedDict())[number] = Block(row, norm, table.recompute, parts(row.name))
        self.stages = list(stages)
        for name, blocks in stages.items():
            self.add_module(name, nn.Sequential(blocks))
        if self.is_last:
            self.fc = nn.Linear(table.features, table.classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.maxpool(relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(x.mean(dim=(2, 3))) if self.is_last else x


def load(file: str) -> ResNet:
    """The model of a file that `hvdkit export` has written, in evaluation mode. Its `metadata` is the file's."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
        if "table" not in metadata:
            raise ValueError(f"{file}: its metadata has no table; expected a file that `hvdkit export` has written")
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dictionary
    model = ResNet(json.loads(metadata["table"], object_hook=lambda fields: SimpleNamespace(**fields)))
    model.to(weights["fc.weight"].dtype).load_state_dict(weights)
    model.metadata = metadata
    return model.eval()


def build(table) -> ResNet:
    """The model that hvdkit trains; it sums the statistics of channels-last images exactly."""
    from hvdkit.adapters.pytorch.batch_norm import BatchNorm2d

    if table.tensor is None:
        return ResNet(table, BatchNorm2d)
    from hvdkit.adapters import pytorch
    from hvdkit.adapters.parts import LayerParts

    return ResNet(table, BatchNorm2d, lambda name: LayerParts(pytorch, table.tensor, name))


if __name__ == "__main__":
    from hvdkit.adapters import pytorch
    from hvdkit.worker.entry import main

    main(pytorch, build, sys.argv[1:])
