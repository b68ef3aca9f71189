"""Where training stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Where training stands, between two updates; what a checkpoint keeps of it.

    `step` counts updates, `epoch` from 0; `images` are those that all ranks together have seen in the epoch at hand.
    `line_loss` and `epoch_loss` are sums over `…_steps` updates of the mean over all ranks, since the last line of
    metrics.jsonl and since the epoch's begin; `train_loss` is the last whole epoch's mean, `val_accuracy` a fraction.
    """

    step: int = 0
    epoch: int = 0
    images: int = 0
    evaluated: bool = False  # whether the figures below are of these very weights
    line_loss: float = 0.0
    line_steps: int = 0
    epoch_loss: float = 0.0
    epoch_steps: int = 0
    train_loss: float = 0.0  # of the last whole epoch
    val_accuracy: float | None = None
    val_loss: float | None = None

    @property
    def position(self) -> tuple[int, int]:
        """How far training is, whatever the size of an update."""
        return self.epoch, self.images
