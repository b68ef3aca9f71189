"""How many updates a run makes, how many batches each update takes, and how far a run has come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from hvdkit.core.schedule import LearningRate, learning_rate
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe
from hvdkit.results.train import MetricLine

if TYPE_CHECKING:  # the command line counts steps and starts without NumPy
    from hvdkit.data import Shard
    from hvdkit.data.dataset import Batch, Split


_FIRST = 0.05  # the largest share of the first weights in an average that needs no note
_FORGETS = 5  # times 1 / (1 - decay) updates leave a share of e^-5 of the first weights
NOTED = "HVDKIT_NOTED"  # set for ranks if the command has said what `StepPlan.unreached` says


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
        """The learning rate as a function of the update."""
        return learning_rate(self.recipe, self.size, self.steps_per_epoch)

    def unreached(self) -> list[str]:
        """A line for each thing in the recipe that is to happen, and does not within these updates."""
        recipe, schedule, total, rate = self.recipe, self.recipe.schedule, self.total_steps, self.rate
        spe = self.steps_per_epoch
        ends = f"the run ends after {_count(total, 'step')} ({_count(round(total / spe, 2), 'epoch')})"
        late = [milestone for milestone in schedule.milestones if milestone * spe >= total]
        found = []
        if rate.warmup >= total:
            found.append(
                f"schedule.warmup_epochs: {schedule.warmup_epochs:g} are {_count(rate.warmup, 'step')}, and {ends}: "
                f"the learning rate rises to {rate(total - 1):.3g} and never reaches {rate.peak:.3g}"
            )
        elif late:
            found.append(f"schedule.milestones: {', '.join(f'{each:g}' for each in late)}: {ends}, before them")
        elif schedule.decay in ("cosine", "polynomial") and total < rate.total:
            found.append(
                f"steps: {ends}, and the schedule is for {_count(recipe.epochs, 'epoch')}: the learning rate is "
                f"{rate(total - 1):.3g} at the end, of {rate.peak:.3g}"
            )
        if recipe.accumulate > (batches := self.samples // self.global_batch):
            found.append(
                f"accumulate: {recipe.accumulate} batches make an update, and an epoch has {batches}, so each update "
                "is of fewer samples than its learning rate is scaled to"
            )
        saved, every = recipe.checkpoint, {"check_ranks": recipe.check_ranks}
        if saved and not 0 < saved.every_epochs <= self.epochs and not 0 < saved.every_steps <= total:
            key, number = ("every_steps", _count(saved.every_steps, "step"))
            if not saved.every_steps:
                key, number = "every_epochs", _count(saved.every_epochs, "epoch")
            found.append(f"checkpoint.{key}: every {number}, and {ends}: the only checkpoint is that of its end")
        if getattr(recipe.compression, "warmup_epochs", 0) * spe >= total:
            found.append(f"compression.warmup_epochs: {ends}, before the ratio reaches its value")
        if recipe.sync:
            every["sync.every"] = recipe.sync.every
            if recipe.sync.start * spe >= total:
                found.append(f"sync.start: {recipe.sync.start:g}, and {ends}: no update is a local one")
        if recipe.elastic:
            every["elastic.commit_every"] = recipe.elastic.commit_every
        if recipe.log_every != Recipe.model_fields["log_every"].default:
            every["log_every"] = recipe.log_every
        found += [
            f"{key}: every {_count(number, 'step')}, and {ends}: it never happens"
            for key, number in every.items()
            if number > total
        ]
        average = recipe.average_weights
        if average and average.from_epoch and average.from_epoch * spe > total:
            found.append(f"average_weights.from_epoch: {average.from_epoch}, and {ends}: there is no average")
        elif average and average.decay and (left := average.decay ** (total - 1)) > _FIRST:
            advice = f"; give at most {1 - _FORGETS / total:.3g}" if total > 2 * _FORGETS else ""
            found.append(
                f"average_weights.decay: {average.decay:g}, and {ends}: {100 * left:.0f} % of the average are still "
                f"the weights after the first step{advice}"
            )
        if recipe.early_stopping and 1 + recipe.early_stopping.patience >= self.epochs:
            found.append(
                f"early_stopping.patience: {_count(recipe.early_stopping.patience, 'epoch')} after the first one, and "
                f"{ends}: it never ends the run"
            )
        if recipe.warmup_steps >= total:
            found.append(
                f"warmup_steps: throughput leaves out the first {_count(recipe.warmup_steps, 'step')}, and {ends}: it "
                "is that of the last step alone"
            )
        return found

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


def _count(number: float, of: str) -> str:
    return f"{number:,g} {of}{'' if number == 1 else 's'}"


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


def is_before(line: MetricLine, progress: Progress, recounted: bool) -> bool:
    """Whether a line of metrics.jsonl belongs to the training before `progress`.

    If updates are `recounted` from there on, only those of complete epochs do.
    """
    before = line.step < progress.step or (line.step == progress.step and not line.ends_epoch)
    return line.epoch < progress.epoch or (before and not recounted)
