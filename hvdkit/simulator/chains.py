"""A model's table as the chain of blocks that `simulator/meshes.py` takes: what each computes, moves and sends.

The values that are moved are an estimate of what is not matrix products, the smaller part of a step of large models.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hvdkit import tasks
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.update_rules import rule_of
from hvdkit.recipe.schema import Recipe
from hvdkit.results.profile import ITEM_BYTES
from hvdkit.simulator.meshes import BlockWork, ModelWork
from hvdkit.tasks.gpt import GPT
from hvdkit.tasks.parts import block_of
from hvdkit.tasks.resnet import ResNet
from hvdkit.tasks.task import Architecture

# What kernels read or write besides matrix products. Of each token in a GPT's block, in widths: layer norms and sums of
# the residual stream; and, divided over a tensor group, the activation, q, k and v put in order, and the context of the
# heads. Of a weight of attention: scale and mask, softmax and dropout. Kernels that fuse them move about half of what
# the operations would one by one: chosen on two of vTrain's models (docs/reference/simulation.md).
_WHOLE, _PARTS, _OF_SCORES = 5, 12, 3
_OF_CLASSES = 6  # of a logit, which the loss reads in full precision
_OF_MAPS = 4  # of an output of a convolution: written, normalized, activated, read
_LAUNCHES = {"gpt": 25, "resnet": 10}  # kernels of a block's forward pass, as PyTorch runs it without a compiler


def of_recipe(recipe: Recipe, shape: tuple[int, ...] | None) -> ModelWork | None:
    """The chain of a recipe's model for samples of `shape`; None where that is unknown."""
    table, precision = tasks.choose(recipe).architecture(shape), PRECISIONS[recipe.precision]
    full = ITEM_BYTES[precision.parameters]
    slots = len(rule_of(recipe.optimizer).slots)
    if shape is None or not isinstance(table, GPT | ResNet):
        return None
    # The update reads parameters, gradients and slots, and writes all but gradients.
    return of_table(table, shape, ITEM_BYTES[precision.compute], full, full * (3 + 2 * slots))


def of_table(
    table: GPT | ResNet, shape: tuple[int, ...], value_bytes: float, gradient_bytes: float, update_bytes: float
) -> ModelWork:
    """The chain of a model for samples of `shape`: (tokens,), or (height, width, channels)."""
    if isinstance(table, GPT):
        blocks, shared = _gpt(table, shape[0]), float(table.vocabulary * table.width)
    else:
        blocks, shared = _resnet(table, shape[0], shape[1]), 0.0
    return ModelWork(tuple(blocks), shared, value_bytes, gradient_bytes, update_bytes)


def _gpt(table: GPT, tokens: int) -> list[BlockWork]:
    width, blocks = table.width, list[BlockWork]()
    work, held = table.work_by_block(), _parameters(table)
    for index, name in enumerate(table.blocks):
        whole, parts = held[name]
        moved = _PARTS * width + _OF_SCORES * table.heads * tokens
        sums = [float(tokens * width)] * 2
        if index == 0:  # the table of tokens
            parts, whole = parts + table.vocabulary * width, whole + table.context * width
            sums.insert(0, float(tokens * width))
        if index == len(table.blocks) - 1:
            whole += 2 * width
            parts += table.vocabulary * width if index else 0
            moved += _OF_CLASSES * table.vocabulary
        # The table counts attention over all of its context.
        attention = 2 * width * (tokens - table.context)
        blocks.append(
            BlockWork(
                multiply_adds=tokens * (work[name] + attention),
                moved=float(tokens * moved),
                whole_moved=float(tokens * _WHOLE * width),
                parameters=parts,
                whole_parameters=whole,
                launches=_LAUNCHES["gpt"] * (1 + (index == 0) + (index == len(table.blocks) - 1)),
                sums=tuple(sums),
                sends=float(tokens * width),
            )
        )
    return blocks


def _resnet(table: ResNet, height: int, width: int) -> list[BlockWork]:
    maps = {name: (conv, rows * columns) for name, conv, rows, columns in table.maps(height, width)}
    held, blocks = _parameters(table), list[BlockWork]()
    for index, block in enumerate(table.blocks):
        own = {name: of for name, of in maps.items() if name.startswith(f"{block.name}.")}
        if index == 0:
            own = {table.stem.name: maps[table.stem.name]} | own
        whole, parts = held[block.name]
        ends = [table.stem.name, table.stem.norm] * (index == 0) + ["fc"] * (index == len(table.blocks) - 1)
        for name in ends:
            more = held[name]
            whole, parts = whole + more[0], parts + more[1]
        linear = table.features * table.classes if "fc" in ends else 0
        last, area = own[f"{block.name}.{block.convs[-1].name}"]
        cut = {f"{block.name}.{conv.name}" for conv in block.convs[:2]}  # those that a tensor group divides
        work = {name: conv.inputs * conv.outputs * conv.kernel**2 * size for name, (conv, size) in own.items()}
        moved = {name: _OF_MAPS * conv.outputs * size for name, (conv, size) in own.items()}
        summed, its_area = own[f"{block.name}.{block.convs[1].name}"]
        blocks.append(
            BlockWork(
                multiply_adds=sum(amount for name, amount in work.items() if name in cut),
                whole_multiply_adds=linear + sum(amount for name, amount in work.items() if name not in cut),
                moved=float(sum(amount for name, amount in moved.items() if name in cut)),
                whole_moved=float(sum(amount for name, amount in moved.items() if name not in cut)),
                parameters=parts,
                whole_parameters=whole,
                launches=_LAUNCHES["resnet"],
                sums=(float(summed.outputs * its_area),),
                sends=float(last.outputs * area),
            )
        )
    return blocks


def _parameters(table: Architecture) -> Mapping[str, Sequence[float]]:
    """Of a block, by name: the parameters that each rank of a tensor group has whole, and those that are divided."""
    cuts, held = table.cuts(), defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for name, shape in table.parameter_shapes().items():
        held[block_of(name)][name in cuts] += math.prod(shape)
    return held
