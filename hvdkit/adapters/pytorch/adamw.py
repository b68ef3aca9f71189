"""AdamW by PyTorch's fused kernel."""

from __future__ import annotations

import math

import torch

from hvdkit.core.trainable import Slots
from hvdkit.recipe.schema import AdamW

Weights = list[torch.Tensor]
Corrections = tuple[float, float]
_MANY = 1e12  # updates: the powers of Adam's betas are 0


def adamw(
    settings: AdamW,
    decays: list[float],
    weights: Weights,
    gradients: Weights,
    slots: list[Slots],
    rate: float,
    corrections: Corrections,
) -> Weights:
    """Core's AdamW by PyTorch's fused kernel, which reads and writes each tensor once.

    The kernel's own corrections, made from a count of updates, are 1 after `many` of them; the rate and epsilon have
    core's instead.
    """
    root = math.sqrt(corrections[1])
    factor, many = root / corrections[0], torch.full((), _MANY, device=weights[0].device)
    for decay in dict.fromkeys(decays):
        rows = [
            row for row, own in zip(zip(weights, gradients, slots, strict=True), decays, strict=True) if own == decay
        ]
        torch._fused_adamw_(
            [weight for weight, _, _ in rows],
            [gradient.contiguous() for _, gradient, _ in rows],
            [mean for _, _, (mean, _) in rows],
            [square for _, _, (_, square) in rows],
            [],
            [many] * len(rows),
            lr=rate * factor, beta1=settings.beta1, beta2=settings.beta2, weight_decay=decay / factor,
            eps=settings.epsilon * root, amsgrad=False, maximize=False,
        )  # fmt: skip
    return weights
