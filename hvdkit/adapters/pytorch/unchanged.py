"""A context after which a module is what it was before, for a step of which only the result matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unchanged(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers of all kinds, and tensors and numbers that modules keep as plain attributes, are as they were; gradients
    are None."""
    places = [place for module in model.modules() for place in (vars(module), module._buffers)]
    kinds = torch.Tensor | float | int
    kept = [(at, {name: value for name, value in at.items() if isinstance(value, kinds)}) for at in places]
    tensors = {value for _, values in kept for value in values.values() if isinstance(value, torch.Tensor)}
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for place, values in kept:
            place.update(values)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = None
