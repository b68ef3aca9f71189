"""The gradient of a table that is a GPT's first and last layer; run by PyTorch's Python, without Horovod.

Prints JSON: its largest difference from PyTorch's own, and how many tensors of its size backward allocates.
"""

from __future__ import annotations

import json

import torch
from torch.nn.functional import embedding, linear
from torch.profiler import ProfilerActivity, profile

from hvdkit.adapters.pytorch.products import product
from hvdkit.adapters.pytorch.tables import Table

ROWS, WIDTH = 3000, 40


def main() -> None:
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, ROWS, (2, 3, 5))
    tokens[0, :3] = 7  # more than once
    table = Table(ROWS, WIDTH)

    def backward(double: bool) -> None:
        rows, whole = table.double()(tokens) if double else table.float()(tokens)
        torch.nn.functional.cross_entropy(product(rows.tanh(), whole.T).flatten(0, -2), targets.flatten()).backward()

    backward(double=True)
    found, own = table.weight.grad, table.weight.detach().clone().requires_grad_()
    logits = linear(embedding(tokens, own).tanh(), own)
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    assert found is not None and own.grad is not None
    apart = float((found - own.grad).abs().max())
    table.weight.grad = None
    backward(double=False)  # loads what it needs
    table.weight.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backward(double=False)
    size = 4 * ROWS * WIDTH
    whole = [event.name for event in profiler.events() if 0.9 * size < event.self_cpu_memory_usage < 1.1 * size]
    print(json.dumps({"apart": apart, "allocated": whole}))


if __name__ == "__main__":
    main()
