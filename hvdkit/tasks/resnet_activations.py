"""What a `tasks.resnet.ResNet` keeps of an image until backward."""

from __future__ import annotations

from typing import Any

from hvdkit.tasks.task import Activations


def activations(table: Any, shape: tuple[int, ...], recompute: bool) -> Activations:
    """About what of one image of `shape` is kept until backward.

    Counted are each convolution's output, which its batch norm needs, and the normalized one, which the next layer
    needs; and the output of the max pooling with the places of its values, 8 bytes each. With `recompute` these are
    the blocks' inputs, and all of the largest block. Of a stage, also what it receives; of what a tensor group divides,
    this rank's part.
    """
    outputs = {name: conv.outputs * height * width for name, conv, height, width in table.maps(*shape[:2])}
    first, parts = table.blocks[0], table.tensor.size if table.tensor else 1
    # A first block has the pooled map's size: the stride of its convolutions is 1.
    x = outputs[f"{first.name}.conv1"] * first.convs[0].inputs // first.convs[0].outputs
    pooled = x if table.max_pool and table.is_first else 0
    begin = 2 * outputs[table.stem.name] if table.is_first else 0
    inputs, inner = list[int](), list[int]()
    for block in table.blocks:
        kept = [2 * outputs[f"{block.name}.{conv.name}"] for conv in block.convs]
        if block in table.own_blocks:
            begin += 0 if table.is_first or inputs or recompute else x
            inputs.append(x)
            all_of_it = kept[0] // parts + sum(kept[1:])
            inner.append(all_of_it + (outputs[f"{block.name}.{block.projection.name}"] if block.projection else 0))
        x = kept[-1] // 2
    blocks = sum(inputs) + max(inner) if recompute else pooled + sum(inner)
    return Activations(compute=begin + blocks, full=2 * pooled)
