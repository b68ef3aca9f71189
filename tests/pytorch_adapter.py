"""Parts of PyTorch's adapter, each in a function that asserts; run by PyTorch's Python, without Horovod."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding, linear
from torch.profiler import ProfilerActivity, profile

from hvdkit.adapters.pytorch.blocks import BlockMemory, blocks_of, tied_names, watch
from hvdkit.adapters.pytorch.gradients import JoinedGradients
from hvdkit.adapters.pytorch.tables import TiedEmbedding
from hvdkit.adapters.pytorch.training import fastest_layout
from hvdkit.errors import RequestError


class Transformer(nn.Module):
    """Two layers between an embedding and a head; the second layer has the first one's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
        self.layers[1][1] = self.layers[0][1]


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return type("Result", (), {"values": super().forward(x)})()


class Net(nn.Module):
    """A convolution in channels-last memory, a layer that is used twice, and one that is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twice, self.rare = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, images: torch.Tensor, rarely: bool) -> torch.Tensor:
        x = self.conv(images.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        x = self.twice(self.twice(x).tanh())
        return self.rare(x) if rarely else x


class Uses:
    """Allocates and frees as it is told."""

    def __init__(self) -> None:
        self.memory: dict[str, BlockMemory] = {}
        self.heard: list[str] = []

    def begin(self, block: str, phase: str) -> None:
        self.heard.append(f"{block} {phase}")
        self.memory[block].allocate()
        self.memory[block].vector.fill_(0.5)

    def end(self, block: str, phase: str) -> None:
        self.memory[block].free()

    def held(self) -> int:
        return sum(memory.vector.untyped_storage().nbytes() for memory in self.memory.values())


def names(model: nn.Module) -> dict[str, list[str]]:
    return blocks_of(model, [name for name, _ in model.named_parameters()])


def fault(function: Any) -> str:
    try:
        function()
    except (RequestError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def blocks_are_elements_of_containers_or_children() -> None:
    assert names(Transformer()) == {
        "": ["embedding.weight", "head.weight", "head.bias", "layers.0.1.weight", "layers.0.1.bias"],
        "layers.0": ["layers.0.0.weight", "layers.0.0.bias"],
        "layers.1": ["layers.1.0.weight", "layers.1.0.bias"],
    }
    model, each = Children(), ("weight", "bias")
    blocks = {"": ["scale"], **{block: [f"{block}.{name}" for name in each] for block in ("first", "second")}}
    assert names(model) == blocks
    model.second.weight = model.first.weight
    assert tied_names(model) == {"second.weight": "first.weight"}


def a_chain_trains_with_memory_only_during_uses() -> None:
    model, whole = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    for parameter in whole.parameters():
        nn.init.constant_(parameter, 0.5)
    parameters = dict(model.named_parameters())
    blocks = {block: {name: parameters[name] for name in own} for block, own in names(model).items()}
    uses = Uses()
    watch(model, blocks, uses)
    for name, own in blocks.items():
        uses.memory[name] = BlockMemory(own, sum(parameter.numel() for parameter in own.values()))
    assert fault(lambda: linear(torch.ones(1, 4), model[0].weight)), "there are no values outside"
    inputs = torch.ones(3, 4)
    loss = model(inputs).sum()
    assert not uses.held()
    loss.backward()
    assert not uses.held()
    whole(inputs).sum().backward()
    assert all(
        torch.equal(mine.grad, theirs.grad) for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True)
    )
    with torch.no_grad():
        model(inputs)
    order = ["0", "2", "3"]
    phases = {"forward": order, "backward": order[::-1], "prediction": order}
    assert uses.heard == [f"{block} {phase}" for phase, those in phases.items() for block in those]


def outputs_that_hide_tensors_are_refused() -> None:
    model, uses = nn.Sequential(Odd(2, 2)), type("", (Uses,), {"begin": lambda *_: None})()
    watch(model, {"0": dict(model.named_parameters())}, uses)
    said = fault(lambda: model(torch.ones(1, 2)))
    assert "sharding: parameters: expected that 0 returns tensors" in said and "got a Result" in said


def joined_gradients_are_those_of_backward() -> None:
    """Two steps beside a model whose gradients stay apart; the second does not use a layer."""
    torch.manual_seed(1)
    mine, theirs = Net(), Net()
    theirs.load_state_dict(mine.state_dict())
    parameters, images = dict(mine.named_parameters()), torch.randn(2, 3, 5, 5)
    first, rest = list(parameters)[:3], list(parameters)[3:]
    size, others = (sum(parameters[name].numel() for name in group) for group in (first, rest))
    joined = JoinedGradients(parameters, [(first, size + 1), (rest, others)])
    for rarely in (True, False):
        joined.begin()
        mine(images, rarely).square().sum().backward()
        theirs.zero_grad()
        theirs(images, rarely).square().sum().backward()
        gradients = joined.gradients()
        for name, parameter in theirs.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.equal(gradients[name], expected), name
    assert not any(parameter.grad is not None for parameter in mine.parameters())
    in_order = torch.cat([gradients[name].reshape(-1) for name in first])
    joined.vectors[0].mul_(2)
    assert torch.equal(2 * in_order, joined.vectors[0][:size]) and not joined.vectors[0][size]
    assert joined.holds(gradients) and not joined.holds({**gradients, first[0]: gradients[first[0]] * 1})


def resident() -> int:
    """MiB of this process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


def a_large_block_returns_its_memory() -> None:
    parameter = nn.Parameter(torch.zeros(16 * 2**20))
    memory = BlockMemory({"weight": parameter}, parameter.numel())
    before = resident()
    memory.allocate()
    memory.vector.fill_(1.0)
    assert resident() - before >= 60
    memory.free()
    assert resident() - before <= 4 and parameter.numel() == 0
    memory.allocate()
    memory.vector.fill_(0.5)
    assert float(parameter.sum()) == 2.0**23


def a_tied_tables_gradient_is_one_tensor() -> None:
    """PyTorch itself allocates three: those of both uses, and their sum."""
    torch.manual_seed(1)
    rows, width = 3000, 40
    tokens, targets = torch.randint(0, rows, (2, 3, 5))
    tokens[0, :3] = 7  # more than once
    table = TiedEmbedding(rows, width)

    def backward() -> None:
        table.weight.grad = None
        looked_up, whole = table(tokens)
        cross_entropy((looked_up.tanh() @ whole.T).flatten(0, -2), targets.flatten()).backward()

    table.double()
    backward()
    own = table.weight.detach().clone().requires_grad_()
    cross_entropy(linear(embedding(tokens, own).tanh(), own).flatten(0, -2), targets.flatten()).backward()
    assert float((table.weight.grad - own.grad).abs().max()) < 1e-15
    table.float()
    backward()  # loads what it needs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backward()
    size = 4 * rows * width
    large = [event.name for event in profiler.events() if 0.9 * size < event.self_cpu_memory_usage < 1.1 * size]
    assert large == ["aten::mm"], large


def only_wide_convolutions_on_a_cpu_take_contiguous_images() -> None:
    cpu, wide = torch.device("cpu"), nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 128, 3))
    assert fastest_layout(wide, cpu) is torch.contiguous_format
    assert fastest_layout(wide, torch.device("cuda")) is torch.channels_last
    assert fastest_layout(nn.Sequential(nn.Conv2d(3, 16, 3), wide), cpu) is torch.channels_last


if __name__ == "__main__":
    only_wide_convolutions_on_a_cpu_take_contiguous_images()
    blocks_are_elements_of_containers_or_children()
    a_chain_trains_with_memory_only_during_uses()
    outputs_that_hide_tensors_are_refused()
    joined_gradients_are_those_of_backward()
    a_tied_tables_gradient_is_one_tensor()
    a_large_block_returns_its_memory()
