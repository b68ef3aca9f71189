"""What a PyTorch model's blocks are, and that their memory is let go; run by a runtime's Python, without Horovod.

Prints JSON: findings by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvdkit.adapters.pytorch.blocks import BlockMemory, blocks_of, tied_names, watch
from hvdkit.errors import RequestError


class Transformer(nn.Module):
    """Two layers between an embedding and a head; the second layer has the first one's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
        self.layers[1][1] = self.layers[0][1]
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))


@dataclass
class Result:
    values: torch.Tensor


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Result(super().forward(x))


class Uses:
    """Allocates and frees as it is told."""

    def __init__(self) -> None:
        self.memory: dict[str, BlockMemory] = {}
        self.heard: list[str] = []

    def begin(self, block: str, phase: str) -> None:
        self.heard.append(f"{block or 'root'} {phase}")
        if phase != "prediction" or block:
            self.memory[block].allocate()
            self.memory[block].vector.fill_(0.5)

    def end(self, block: str, phase: str) -> None:
        if block:
            self.memory[block].free()


def names(model: nn.Module) -> dict[str, list[str]]:
    return blocks_of(model, [name for name, _ in model.named_parameters()])


def fault(function: Any) -> str:
    try:
        function()
    except (RequestError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained() -> dict[str, Any]:
    """A step of a chain of three layers whose memory is there only during their uses."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    for parameter in whole.parameters():
        nn.init.constant_(parameter, 0.5)
    parameters = dict(model.named_parameters())
    blocks = {block: {name: parameters[name] for name in each} for block, each in names(model).items()}
    uses = Uses()
    watch(model, blocks, uses)
    uses.memory |= {name: BlockMemory(each, sum(one.numel() for one in each.values())) for name, each in blocks.items()}
    outside = fault(lambda: nn.functional.linear(torch.ones(1, 4), model[0].weight))
    inputs = torch.ones(3, 4)
    held = []
    loss = model(inputs).sum()
    held.append(sum(each.vector.untyped_storage().nbytes() for each in uses.memory.values()))
    loss.backward()
    held.append(sum(each.vector.untyped_storage().nbytes() for each in uses.memory.values()))
    whole(inputs).sum().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    with torch.no_grad():
        model(inputs)
    return {
        "outside": bool(outside),
        "held": held,
        "equal": all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs),
        "heard": uses.heard,
    }


def odd() -> str:
    model = nn.Sequential(Odd(2, 2))
    watch(model, {"0": dict(model.named_parameters())}, type("", (Uses,), {"begin": lambda *_: None})())
    return fault(lambda: model(torch.ones(1, 2)))


def tied() -> dict[str, str]:
    model = Children()
    model.second.weight = model.first.weight
    return tied_names(model)


found = {"transformer": names(Transformer()), "children": names(Children()), "trained": trained(), "odd": odd()}
print(json.dumps(found | {"tied": tied()}))
