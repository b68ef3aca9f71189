"""Gradients that are parts of vectors, and the memory of vectors; run by PyTorch's Python, without Horovod.

Prints JSON: findings by name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import nn

from hvdkit.adapters.pytorch.blocks import BlockMemory
from hvdkit.adapters.pytorch.gradients import JoinedGradients


class Net(nn.Module):
    """A convolution in channels-last memory, a layer that is used twice, and one that is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twice, self.rare = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, images: torch.Tensor, rarely: bool) -> torch.Tensor:
        x = self.conv(images.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        x = self.twice(self.twice(x).tanh())
        return self.rare(x) if rarely else x


def compared() -> dict[str, bool]:
    """Two steps beside a model whose gradients stay apart; the second does not use a layer."""
    torch.manual_seed(1)
    mine, theirs = Net(), Net()
    theirs.load_state_dict(mine.state_dict())
    parameters = dict(mine.named_parameters())
    names, images = list(parameters), torch.randn(2, 3, 5, 5)
    first, rest = names[:3], names[3:]
    size = sum(parameters[name].numel() for name in first)
    joined = JoinedGradients(parameters, [(first, size + 1), (rest, sum(parameters[name].numel() for name in rest))])
    equal = []
    for rarely in (True, False):
        joined.begin()
        mine(images, rarely).square().sum().backward()
        theirs.zero_grad()
        theirs(images, rarely).square().sum().backward()
        gradients = joined.gradients()
        for name, parameter in theirs.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            equal.append(torch.equal(gradients[name], expected))
    in_order = torch.cat([gradients[name].reshape(-1) for name in first])
    joined.vectors[0].mul_(2)
    return {
        "equal": all(equal),
        "kept": any(parameter.grad is not None for parameter in mine.parameters()),
        "order": torch.equal(2 * in_order, joined.vectors[0][:size]) and not joined.vectors[0][size],
        "holds": joined.holds(gradients) and not joined.holds({**gradients, names[0]: gradients[names[0]] * 1}),
    }


def resident() -> int:
    """MiB of this process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


def returned() -> dict[str, float]:
    """Resident memory around uses of a block of 64 MiB, and its sum after new values."""
    parameter = nn.Parameter(torch.zeros(16 * 2**20))
    memory = BlockMemory({"weight": parameter}, parameter.numel())
    before = resident()
    memory.allocate()
    memory.vector.fill_(1.0)
    there = resident()
    memory.free()
    after, empty = resident(), parameter.numel()
    memory.allocate()
    memory.vector.fill_(0.5)
    return {"taken": there - before, "kept": after - before, "empty": empty, "sum": float(parameter.sum())}


print(json.dumps({"gradients": compared(), "memory": returned()}))
