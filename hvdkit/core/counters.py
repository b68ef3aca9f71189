"""The counters of training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """The progress of training between two updates, as a checkpoint stores it.

    `step` counts updates; `epoch` counts from 0; `images` counts the images of the current epoch over all ranks.
    `line_loss` and `epoch_loss` are sums of the updates' mean losses over all ranks, since the last line of
    metrics.jsonl and since the start of the epoch; `line_steps` and `epoch_steps` count the updates in each sum.
    `train_loss` is the mean of the last complete epoch, `val_accuracy` a fraction of 1.
    """

    step: int = 0
    epoch: int = 0
    images: int = 0
    evaluated: bool = False  # whether val_accuracy and val_loss belong to the current weights
    line_loss: float = 0.0
    line_steps: int = 0
    epoch_loss: float = 0.0
    epoch_steps: int = 0
    train_loss: float = 0.0  # of the last complete epoch
    val_accuracy: float | None = None
    val_loss: float | None = None

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, images): comparable between runs with updates of different sizes."""
        return self.epoch, self.images
