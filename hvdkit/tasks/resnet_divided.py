"""A `tasks.resnet.ResNet` that is divided over ranks: in stages of blocks, and in parts of blocks."""

from __future__ import annotations

from typing import Any

from hvdkit.errors import RequestError
from hvdkit.recipe.communication import Parallel
from hvdkit.tasks.parts import BlockRange, Cut, check_stages, stage_of

# Multiply-adds in the time that an output of a convolution takes beside them: 19 and 24 for each of the four times that
# it is moved, by two runs of ResNet-20 under PyTorch on a CPU (docs/parallelism.md).
_OF_OUTPUT = 4 * 20


def cuts(table: Any) -> dict[str, Cut]:
    """The channels between the first two convolutions of each block are divided, with their batch norm.

    The first is cut by its outputs, the second by its inputs; its products are added up.
    """
    divided = dict[str, Cut]()
    for block in table.own_blocks:
        first, second = block.convs[:2]
        leaves = ("weight", "bias", "running_mean", "running_var")
        names = [f"{first.name}.weight", *(f"{first.norm}.{leaf}" for leaf in leaves)]
        divided |= {f"{block.name}.{name}": Cut(0) for name in names} | {f"{block.name}.{second.name}.weight": Cut(1)}
    return divided


def stage(table: Any, parallel: Parallel, index: int) -> BlockRange:
    """Run `index` of those into which the blocks are cut."""
    return stage_of(parallel, index, list(cost_by_block(table).values()))


def check(table: Any, parallel: Parallel) -> None:
    """Raise RequestError unless each stage has a block, and each part of a block as many channels."""
    check_stages(parallel, len(table.blocks))
    fewest = min(block.convs[0].outputs for block in table.blocks)  # of which all are multiples
    if fewest % parallel.tensor:
        raise RequestError(
            f"parallel.tensor: expected a divisor of {fewest}, the channels in the first block of {table.name}, got "
            f"{parallel.tensor}"
        )


def cost_by_block(table: Any) -> dict[str, float]:
    """A block's multiply-adds, and what its maps take that are written, normalized, activated and read."""
    side, costs = table.usual_side, dict[str, float](work_by_block(table))
    names = list(costs)
    for name, conv, rows, columns in table.maps(side, side):
        block = ".".join(name.split(".")[:2])
        costs[block if block in costs else names[0]] += _OF_OUTPUT * conv.outputs * rows * columns
    return costs


def work_by_block(table: Any) -> dict[str, int]:
    """Of an image of the usual size."""
    names = [block.name for block in table.blocks]
    work, ends = dict.fromkeys(names, 0), {table.stem.name: names[0], "fc": names[-1]}
    for layer, amount in table.work_by_layer(table.usual_side).items():
        work[ends.get(layer) or ".".join(layer.split(".")[:2])] += amount
    return work
