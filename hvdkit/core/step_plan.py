"""How many updates a run makes, how many batches each update takes, and how far a run has come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from hvdkit.core.schedule import LearningRate, scaled_rate
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe

if TYPE_CHECKING:  # the command line counts steps and starts without NumPy
    from hvdkit.data import Shard
    from hvdkit.data.dataset import Batch, Split


@dataclass(frozen=True)
class StepPlan:
    """The plan of a recipe for a training split of `samples` samples and `size` ranks along the data axis.

    An update takes `accumulate` batches of each rank; the last update of an epoch takes the remaining ones. Raises
    RequestError if the split is smaller than one global batch.
    """

    recipe: Recipe
    samples: int
    size: int

    def __post_init__(self) -> None:
        if self.samples < self.global_batch:
            most, ranks = self.samples // self.size, f"{self.size} rank{'s' if self.size > 1 else ''}"
            raise RequestError(
                f"batch_size: expected at most {self.samples} samples over {ranks}, "
                f"got {self.recipe.batch_size} × {self.size} = {self.global_batch}; "
                + (f"give batch_size={most} or less" if most else f"take {self.samples} ranks or fewer")
            )

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one batch."""
        return self.recipe.batch_size * self.size

    def group_sizes(self, samples: int = 0) -> list[int]:
        """Batches in each remaining update of an epoch of which `samples` samples have been used."""
        groups, rest = divmod((self.samples - samples) // self.global_batch, self.recipe.accumulate)
        return [self.recipe.accumulate] * groups + ([rest] if rest else [])

    @property
    def steps_per_epoch(self) -> int:
        """Updates in a complete epoch."""
        return len(self.group_sizes())

    @property
    def total_steps(self) -> int:
        """Updates in the run: those of the recipe's epochs, or `steps` if that is fewer."""
        whole = self.recipe.epochs * self.steps_per_epoch
        return min(whole, self.recipe.steps or whole)

    @property
    def epochs(self) -> int:
        """Epochs that are started in these updates."""
        return -(-self.total_steps // self.steps_per_epoch)

    @property
    def rate(self) -> LearningRate:
        """The learning rate as a function of the update. It spans the recipe's epochs, even if `steps` ends the run
        earlier."""
        recipe = self.recipe
        return scaled_rate(
            recipe.optimizer.learning_rate,
            recipe.schedule,
            batch_size=recipe.batch_size * recipe.accumulate,
            size=self.size,
            epochs=recipe.epochs,
            steps_per_epoch=self.steps_per_epoch,
        )

    def step_at(self, epoch: int, samples: int) -> int:
        """Updates that are finished once `samples` samples of an epoch have been used."""
        return min((epoch + 1) * self.steps_per_epoch - len(self.group_sizes(samples)), self.total_steps)

    def groups(
        self, split: Split, shard: Shard, epoch: int, samples: int = 0, sizes: list[int] | None = None
    ) -> Iterator[list[Batch]]:
        """A rank's batches for the rest of an epoch, one list per update."""
        from hvdkit.data.batches import epoch_batches

        recipe = self.recipe
        batches = epoch_batches(
            split, recipe.batch_size, recipe.seed, epoch, shard.rank, shard.size, recipe.data.augment, samples
        )
        with closing(batches):  # stops the prefetching threads wherever training stops
            for size in self.group_sizes(samples) if sizes is None else sizes:
                yield list(islice(batches, size))


def due(every: int, count: int) -> bool:
    """Whether something that happens `every` so many steps or epochs (0: never) happens after `count`."""
    return every > 0 and count % every == 0


@dataclass
class Progress:
    """The progress of training between two updates, as a checkpoint stores it.

    `step` counts updates; `epoch` counts from 0; `samples` counts the samples of the current epoch over all ranks.
    `line_loss` and `epoch_loss` are sums of the updates' mean losses over all ranks, since the last line of
    metrics.jsonl and since the start of the epoch; `line_steps` and `epoch_steps` count the updates in each sum.
    `train_loss` is the mean of the last complete epoch. `validation` has the task's metrics by name; it is empty if
    there are no validation samples. `average_validation` has those of the averaged weights, if there are any. With
    early stopping, `best` is the best value so far of the metric `watched`, with a minus sign if lower is better,
    reached at the end of epoch `best_epoch`, counted from 1.
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
    average_validation: dict[str, float] = field(default_factory=dict)
    watched: str = ""
    best: float | None = None
    best_epoch: int = 0

    @property
    def judged(self) -> dict[str, float]:
        """The validation that decides on the best checkpoint: that of the averaged weights, where there are any."""
        return self.average_validation or self.validation

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, samples): comparable between runs with updates of different sizes."""
        return self.epoch, self.samples
