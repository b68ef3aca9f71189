"""The counters of training."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """The progress of training between two updates, as a checkpoint stores it.

    `step` counts updates; `epoch` counts from 0; `samples` counts the samples of the current epoch over all ranks.
    `line_loss` and `epoch_loss` are sums of the updates' mean losses over all ranks, since the last line of
    metrics.jsonl and since the start of the epoch; `line_steps` and `epoch_steps` count the updates in each sum.
    `train_loss` is the mean of the last complete epoch. `validation` has the task's metrics by name; it is empty if
    there are no validation samples.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    evaluated: bool = False  # whether `validation` belongs to the current weights
    line_loss: float = 0.0
    line_steps: int = 0
    epoch_loss: float = 0.0
    epoch_steps: int = 0
    train_loss: float = 0.0  # of the last complete epoch
    validation: dict[str, float] = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, samples): comparable between runs with updates of different sizes."""
        return self.epoch, self.samples
