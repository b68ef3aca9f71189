"""Cross-entropy as a sum and its count."""

from __future__ import annotations

import torch

from hvdkit.adapters.pytorch.training import cross_entropy
from hvdkit.core.seam import class_weights
from hvdkit.recipe.schema import Loss


def counted_cross_entropy(loss: Loss, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `cross_entropy`, with ignored labels and class weights, and its count (`Adapter.cross_entropy`)."""
    ignored = torch.iinfo(torch.int64).min if loss.ignored_label is None else loss.ignored_label
    counts = labels != ignored
    weights = None if loss.class_weights is None else logits.new_tensor(class_weights(loss, logits.shape))
    total = cross_entropy(
        logits, labels, weight=weights, ignore_index=ignored, label_smoothing=loss.label_smoothing, reduction="sum"
    )
    return total, counts.sum() if weights is None else weights[labels[counts]].sum()
