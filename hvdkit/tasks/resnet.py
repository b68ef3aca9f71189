"""ResNet as data: the table from which each framework builds its model, and the initial weights for all of them.

Two families: the CIFAR form (He et al. 2016, section 4.2; 6n+2 layers, projection shortcuts) and the ImageNet form
(table 1), whose bottleneck has the stride in the 3×3 convolution ("v1.5"). Names and layouts are torchvision's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hvdkit.errors import RequestError
from hvdkit.tasks.task import Activations, Architecture, NormalizedLayer

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.recipe.communication import Parallel
    from hvdkit.tasks.parts import Cut

BN_MOMENTUM = 0.9  # share of the old running statistic that is kept; PyTorch calls 1 - 0.9 its momentum
BN_EPSILON = 1e-5
# Multiply-adds in the time that an output of a convolution takes beside them: 19 and 24 for each of the four times that
# it is moved, by two runs of ResNet-20 under PyTorch on a CPU (docs/parallelism.md).
_OF_OUTPUT = 4 * 20


@dataclass(frozen=True)
class Conv:
    """A square convolution without bias, padded by (kernel - 1) / 2 on each side, with the name of its batch norm."""

    name: str
    norm: str
    inputs: int
    outputs: int
    kernel: int
    stride: int

    @property
    def padding(self) -> int:
        """Pixels on each side. TensorFlow's "same" differs for stride 2: it pads less before than after."""
        return (self.kernel - 1) // 2


@dataclass(frozen=True)
class ResidualBlock:
    """Convolutions, each with batch norm, with ReLU between them; plus the shortcut, then ReLU.

    Without a projection the shortcut is the identity.
    """

    name: str
    convs: tuple[Conv, ...]
    projection: Conv | None

    def part(self, ranks: int) -> ResidualBlock:
        """What each of these ranks has of the block, which divide the channels between its first two convolutions."""
        first, second, *rest = self.convs
        first, second = replace(first, outputs=first.outputs // ranks), replace(second, inputs=second.inputs // ranks)
        return replace(self, convs=(first, second, *rest))


@dataclass(frozen=True)
class ResNet(Architecture):
    """Stem, (3×3 max pooling of stride 2, padding 1), blocks, global average pooling, a linear layer.

    `compute_dtype` is that of everything between the images and the pooled features, except batch norm's statistics. A
    framework that casts models itself need not read it. With `recompute` each block stores only its input (Chen et al.
    2016). With `zero_init_residual` each block starts as its shortcut: the scale of its last batch norm is 0. A stage
    of a pipeline has some of the blocks; the first also what comes before them, the last what comes after.
    """

    name: str
    stem: Conv
    max_pool: bool
    blocks: tuple[ResidualBlock, ...]
    features: int
    classes: int
    zero_init_residual: bool = False
    norm_momentum: float = field(default=BN_MOMENTUM, kw_only=True)
    norm_epsilon: float = field(default=BN_EPSILON, kw_only=True)

    @property
    def own_blocks(self) -> tuple[ResidualBlock, ...]:
        """The blocks of this stage of a pipeline, which may be all."""
        return self.blocks[self.stage.start : self.stage.stop] if self.stage else self.blocks

    def convolutions(self) -> Iterator[tuple[str, str, Conv]]:
        """Yield (full name, full name of its batch norm, row) for each convolution, in forward order."""
        if self.is_first:
            yield self.stem.name, self.stem.norm, self.stem
        for block in self.own_blocks:
            for conv in (*block.convs, *((block.projection,) if block.projection else ())):
                yield f"{block.name}.{conv.name}", f"{block.name}.{conv.norm}", conv

    def maps(self, height: int, width: int) -> Iterator[tuple[str, Conv, int, int]]:
        """(full name, row, height and width of its output) of each convolution, for images of this size."""
        height, width = _reduced(height, self.stem.stride), _reduced(width, self.stem.stride)
        yield self.stem.name, self.stem, height, width
        if self.max_pool:
            height, width = _reduced(height, 2), _reduced(width, 2)
        for block in self.blocks:
            for conv in block.convs:
                height, width = _reduced(height, conv.stride), _reduced(width, conv.stride)
                yield f"{block.name}.{conv.name}", conv, height, width
            if block.projection:
                yield f"{block.name}.{block.projection.name}", block.projection, height, width

    def last_map(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the last, smallest feature maps for images of this size."""
        *_, (_, _, height, width) = self.maps(height, width)
        return height, width

    @property
    def usual_side(self) -> int:
        """Height and width in pixels of the images that the family is made for."""
        return 224 if self.max_pool else 32

    def multiply_adds(self, side: int) -> int:
        """Multiply-adds of a forward pass of one image of `side` × `side` pixels, in convolutions and linear layer."""
        return sum(self.work_by_layer(side).values())

    def work_by_layer(self, side: int, other_side: int | None = None) -> dict[str, int]:
        """The same by layer: all convolutions and the linear layer `fc`, by their full names."""
        work = {
            name: conv.inputs * conv.outputs * conv.kernel**2 * height * width
            for name, conv, height, width in self.maps(side, other_side or side)
        }
        return work | {"fc": self.features * self.classes}

    def work_by_block(self) -> dict[str, int]:
        """Of an image of the usual size."""
        names = [block.name for block in self.blocks]
        work, ends = dict.fromkeys(names, 0), {self.stem.name: names[0], "fc": names[-1]}
        for layer, amount in self.work_by_layer(self.usual_side).items():
            work[ends.get(layer) or ".".join(layer.split(".")[:2])] += amount
        return work

    def cost_by_block(self) -> dict[str, float]:
        """A block's multiply-adds, and what its maps take that are written, normalized, activated and read."""
        side, costs = self.usual_side, dict[str, float](self.work_by_block())
        for name, conv, rows, columns in self.maps(side, side):
            block = ".".join(name.split(".")[:2])
            costs[block if block in costs else self.blocks[0].name] += _OF_OUTPUT * conv.outputs * rows * columns
        return costs

    def activations(self, shape: tuple[int, ...], recompute: bool = False) -> Activations:
        """About what of one image of `shape` is kept until backward.

        Counted are each convolution's output, which its batch norm needs, and the normalized one, which the next layer
        needs; and the output of the max pooling with the places of its values, 8 bytes each. With `recompute` these are
        the blocks' inputs, and all of the largest block. Of a stage, also what it receives; of what a tensor group
        divides, this rank's part.
        """
        outputs = {name: conv.outputs * height * width for name, conv, height, width in self.maps(*shape[:2])}
        first, parts = self.blocks[0], self.tensor.size if self.tensor else 1
        # A first block has the pooled map's size: the stride of its convolutions is 1.
        x = outputs[f"{first.name}.conv1"] * first.convs[0].inputs // first.convs[0].outputs
        pooled = x if self.max_pool and self.is_first else 0
        begin = 2 * outputs[self.stem.name] if self.is_first else 0
        inputs, inner = list[int](), list[int]()
        for block in self.blocks:
            kept = [2 * outputs[f"{block.name}.{conv.name}"] for conv in block.convs]
            if block in self.own_blocks:
                begin += 0 if self.is_first or inputs or recompute else x
                inputs.append(x)
                all_of_it = kept[0] // parts + sum(kept[1:])
                inner.append(all_of_it + (outputs[f"{block.name}.{block.projection.name}"] if block.projection else 0))
            x = kept[-1] // 2
        blocks = sum(inputs) + max(inner) if recompute else pooled + sum(inner)
        return Activations(compute=begin + blocks, full=2 * pooled)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the trainable parameters: kernels OIHW, the linear layer (classes, features)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for conv, norm, row in self.convolutions():
            shapes[f"{conv}.weight"] = (row.outputs, row.inputs, row.kernel, row.kernel)
            shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (row.outputs,)
        if self.is_last:
            shapes["fc.weight"] = (self.classes, self.features)
            shapes["fc.bias"] = (self.classes,)
        return shapes

    def cuts(self) -> dict[str, Cut]:
        """The channels between the first two convolutions of each block are divided, with their batch norm.

        The first is cut by its outputs, the second by its inputs; its products are added up.
        """
        from hvdkit.tasks.parts import Cut  # most models are whole

        divided = dict[str, Cut]()
        for block in self.own_blocks:
            first, second = block.convs[:2]
            leaves = ("weight", "bias", "running_mean", "running_var")
            names = [f"{first.name}.weight", *(f"{first.norm}.{leaf}" for leaf in leaves)]
            divided |= {f"{block.name}.{name}": Cut(0) for name in names}
            divided[f"{block.name}.{second.name}.weight"] = Cut(1)
        return divided

    def check_parallel(self, parallel: Parallel) -> None:
        """Raise RequestError unless each stage has a block, and each part of a block as many channels."""
        from hvdkit.tasks.parts import check_stages

        check_stages(parallel, len(self.blocks))
        fewest = min(block.convs[0].outputs for block in self.blocks)  # of which all are multiples
        if fewest % parallel.tensor:
            raise RequestError(
                f"parallel.tensor: expected a divisor of {fewest}, the channels in the first block of {self.name}, got "
                f"{parallel.tensor}"
            )

    def from_file(self, given: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The tensors under torchvision's names, which timm has too, where they have transformers'.

        PyTorch's `num_batches_tracked` is left out. Raises RequestError for other kinds of ResNet, which the tensors
        show, or the library's configuration.
        """
        from hvdkit.tasks import resnet_files  # only a file of weights needs it

        named = {resnet_files.renamed(name): value for name, value in given.items()}
        shapes = {name: value.shape for name, value in named.items()}
        stem = shapes.get("conv1.weight", ())
        channels = stem[1] if len(stem) == 4 else 3
        known = {name: architecture(name, self.classes, channels).parameter_shapes() for name in NAMES}
        known[self.name] = self.parameter_shapes()
        resnet_files.check_kind(self.name, shapes, config, known)
        return {name: value for name, value in named.items() if not name.endswith("num_batches_tracked")}

    def initial_state(self, seed: int) -> dict[str, np.ndarray]:
        """Initial parameters and batch-norm buffers, float32: bit-identical for every framework and rank.

        Kernels are normal with variance 2 / fan-out (He et al. 2015, section 2.2, backward case), the linear layer is
        normal with standard deviation 0.01 and its bias 0 (Goyal et al. 2017, section 5.1, also for
        `zero_init_residual`). Each tensor has its own random stream, so the values do not depend on the order in which
        tensors are drawn.
        """
        import numpy as np  # imported here because the command line counts parameters and starts without NumPy

        state: dict[str, np.ndarray] = {}
        for name, shape in self.parameter_shapes().items():
            random = np.random.default_rng([seed, zlib.crc32(name.encode())])
            if len(shape) == 4:
                deviation = math.sqrt(2.0 / (shape[0] * shape[2] * shape[3]))
                state[name] = (random.standard_normal(shape) * deviation).astype(np.float32)
            elif len(shape) == 2:
                state[name] = (random.standard_normal(shape) * 0.01).astype(np.float32)
            elif name.endswith(".bias"):
                state[name] = np.zeros(shape, np.float32)
            else:
                state[name] = np.ones(shape, np.float32)
        if self.zero_init_residual:
            for block in self.own_blocks:
                state[f"{block.name}.{block.convs[-1].norm}.weight"][:] = 0.0
        for _, norm, row in self.convolutions():
            state[f"{norm}.running_mean"] = np.zeros(row.outputs, np.float32)
            state[f"{norm}.running_var"] = np.ones(row.outputs, np.float32)
        return state

    def normalized_layers(self) -> Iterator[NormalizedLayer]:
        """All convolutions."""
        return (NormalizedLayer(name, norm) for name, norm, _ in self.convolutions())


# name -> (blocks per stage, bottleneck)
_IMAGENET: dict[str, tuple[tuple[int, ...], bool]] = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
_CIFAR = {"resnet8": 1, "resnet20": 3, "resnet32": 5, "resnet44": 7, "resnet56": 9, "resnet110": 18}

NAMES = (*_CIFAR, *_IMAGENET)


def architecture(name: str, classes: int, channels: int = 3) -> ResNet:
    """The table of a model; `channels` is the number of image channels. Raises KeyError for a name not in NAMES."""
    small = name in _CIFAR
    stages, bottleneck = ((_CIFAR[name],) * 3, False) if small else _IMAGENET[name]
    width = 16 if small else 64
    stem = Conv("conv1", "bn1", channels, width, kernel=3 if small else 7, stride=1 if small else 2)
    blocks, inputs = [], width
    for index, count in enumerate(stages):
        middle = width * 2**index
        for number in range(count):
            stride = 2 if index > 0 and number == 0 else 1
            block = _block(f"layer{index + 1}.{number}", inputs, middle, stride, bottleneck)
            blocks.append(block)
            inputs = block.convs[-1].outputs
    return ResNet(name, stem, not small, tuple(blocks), inputs, classes)


def _reduced(length: int, stride: int) -> int:
    return -(-length // stride)


def _block(name: str, inputs: int, middle: int, stride: int, bottleneck: bool) -> ResidualBlock:
    outputs = middle * 4 if bottleneck else middle
    if bottleneck:
        shapes = [(inputs, middle, 1, 1), (middle, middle, 3, stride), (middle, outputs, 1, 1)]
    else:
        shapes = [(inputs, middle, 3, stride), (middle, outputs, 3, 1)]
    convs = tuple(Conv(f"conv{i}", f"bn{i}", *shape) for i, shape in enumerate(shapes, start=1))
    projected = stride != 1 or inputs != outputs
    projection = Conv("downsample.0", "downsample.1", inputs, outputs, 1, stride) if projected else None
    return ResidualBlock(name, convs, projection)
