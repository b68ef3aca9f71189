"""What `hvdkit.adapters.pytorch` does with a session's gradients between backward and the update."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdkit.adapters.pytorch import tensors
from hvdkit.adapters.pytorch import timing as observing
from hvdkit.adapters.pytorch.collectives import average_in_place
from hvdkit.core import trace_events
from hvdkit.core.update_rules import clip


def average(session: Any) -> None:
    """Make the gradients their means over all ranks, by Horovod's own reduction."""
    if session.overlapped:
        observing.mark(trace_events.SENT, session.device)
        session.optimizer.synchronize()
        observing.mark(trace_events.RECEIVED, session.device)
        return
    gradients = list(whole(session.model).values())
    packed = [session.compressor.compress(gradient) for gradient in gradients]
    observing.mark(trace_events.SENT, session.device)
    average_in_place([sent for sent, _ in packed], name="gradients")
    observing.mark(trace_events.RECEIVED, session.device)
    for gradient, (sent, context) in zip(gradients, packed, strict=True):
        if sent is not gradient:
            gradient.copy_(session.compressor.decompress(sent, context))
    observing.mark(trace_events.REDUCED, session.device)


def average_otherwise(session: Any) -> None:
    """Make the gradients their means over all ranks, by the session's `averaging`."""
    gradients, scaler = whole(session.model), session.scaler
    means = session.averaging(gradients, scaler.get_scale() if scaler.is_enabled() else None)
    for name, gradient in gradients.items():
        if means[name] is not gradient:
            gradient.copy_(means[name])
    observing.mark(trace_events.REDUCED, session.device)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient by name; zeros where it is unused on this rank, maybe not on the others."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def clip_in_place(model: torch.nn.Module, max_norm: float) -> None:
    """Scale all gradients by one factor (`hvdkit.core.update_rules.clip`)."""
    gradients = [parameter.grad for parameter in model.parameters()]
    for gradient, clipped in zip(gradients, clip(gradients, max_norm, tensors), strict=True):
        gradient.copy_(clipped)


def arrays(model: torch.nn.Module, scale: float) -> dict[str, np.ndarray]:
    """The gradients by name, without the scale of the loss; zeros where there are none."""
    return {
        name: np.array((torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).cpu()) / scale
        for name, parameter in model.named_parameters()
    }
