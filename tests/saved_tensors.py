"""Count what PyTorch keeps until backward: prints a JSON list of [half precision, recompute, model, bytes of a sample].

Of models that are divided over ranks, models are the stages of three, and one of them in two parts of its layers.

`test_memory.py` runs it in PyTorch's runtime and compares with what the models' tables count.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hvdkit.adapters.parts import LayerParts
from hvdkit.core.group import Group
from hvdkit.recipe.communication import Parallel
from hvdkit.tasks import gpt, resnet
from recipes.pytorch import gpt as gpt_script
from recipes.pytorch import resnet as resnet_script

GPT = gpt.GPT("gpt", 3, 4, 64, 128, 1000)
RESNET, SIDE = resnet.architecture("resnet18", 10), 64


def saved(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, half: bool) -> float:
    """Bytes of a sample in the tensors that autograd keeps, and in the logits; without weights and their copies."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers(), inputs, targets)}
    weights = {tuple(shape) for each in model.parameters() for shape in (each.shape, each.T.shape)} if half else set()
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tuple(tensor.shape) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # which stays, so that its address is its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each), torch.autocast("cpu", enabled=half):
        logits = model(inputs)
        cross_entropy(logits.flatten(0, -2), targets.flatten())
        keep(logits)
    return sum(each.untyped_storage().nbytes() for each in kept.values()) / len(inputs)


def saved_by_stage(number: int, parts: int) -> float:
    """As `saved`, of one of three stages, with what it receives and sends. Its collectives are left out."""
    table = dataclasses.replace(
        GPT.staged(Parallel(pipeline=3), number), tensor=Group((0, 1), 0, "none") if parts > 1 else None
    )
    model = gpt_script.build(table).train()
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, GPT.vocabulary, (3, GPT.context))
    inputs = torch.randn(3, GPT.context, GPT.width, requires_grad=True) if number else tokens
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        outputs = model(inputs)
        keep(cross_entropy(outputs.flatten(0, -2), tokens.flatten()) if table.here.is_last else outputs)
    return sum(each.untyped_storage().nbytes() for each in kept.values()) / 3


def main() -> None:
    found: list[tuple[bool, bool, str, float]] = []
    for half in (False, True):
        for recompute in (False, True):
            more: dict[str, Any] = {"compute_dtype": "bfloat16" if half else "float32", "recompute": recompute}
            tokens = torch.randint(0, GPT.vocabulary, (3, GPT.context))
            model = gpt_script.build(dataclasses.replace(GPT, **more)).train()
            found.append((half, recompute, "gpt", saved(model, tokens, tokens, half)))
            images, labels = torch.randn(16, 3, SIDE, SIDE), torch.randint(0, 10, (16,))
            model = resnet_script.build(dataclasses.replace(RESNET, **more)).train()
            found.append((half, recompute, "resnet", saved(model, images, labels, half)))
    found += [(False, False, f"stage {number}", saved_by_stage(number, 1)) for number in range(3)]
    LayerParts.enter, LayerParts.leave = (lambda self, x: x.view_as(x)), (lambda self, y: y.clone())  # type: ignore[method-assign]
    found.append((False, False, "stage 1 in parts", saved_by_stage(1, 2)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
