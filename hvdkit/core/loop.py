"""Training as a set of hooks, which `drive` calls for most frameworks and a callback calls for Keras."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.config import Recipe
from hvdkit.core import data as data_
from hvdkit.core import metrics
from hvdkit.core.data import Batch, Dataset, Split
from hvdkit.core.schedule import learning_rate
from hvdkit.core.state import digest, parameters_of
from hvdkit.core.topology import Topology
from hvdkit.errors import RequestError, RunError
from hvdkit.results import MetricLine

if TYPE_CHECKING:
    from hvdkit.core.adapter import Adapter, Session, Tensor


class Loop:
    """One run: what happens at each epoch and step, whoever turns the crank.

    The crank calls begin_epoch, then for each of `groups`: begin_step, the update, end_step; then end_epoch. A group
    has `accumulate` batches, the last of an epoch what is left.
    `step`, `steps_per_epoch` and `total_steps` count updates, `group_sizes` the batches of each update of an epoch.
    After an epoch there are its mean `train_loss`, `val_accuracy` (a fraction of 1) and `val_loss`.
    `tell(phase, step)` hears what the rank does and how many updates it has finished.
    Raises RequestError where the training split is smaller than one global batch.
    """

    def __init__(
        self,
        adapter: Adapter,
        session: Session,
        recipe: Recipe,
        topology: Topology,
        dataset: Dataset,
        metrics_file: metrics.MetricsFile,
        tell: Callable[[str, int], None] = lambda phase, step: None,
    ) -> None:
        self._adapter, self._session = adapter, session
        self._recipe, self._topology, self._dataset = recipe, topology, dataset
        self._metrics_file, self._tell = metrics_file, tell
        samples, global_batch = len(dataset.train), recipe.batch_size * topology.size
        batches = data_.steps_per_epoch(samples, recipe.batch_size, topology.size)
        if batches == 0:
            raise RequestError(
                f"batch_size: expected at most {samples} images over {topology.size} ranks, "
                f"got {recipe.batch_size} × {topology.size} = {global_batch}"
            )
        whole_groups, rest = divmod(batches, recipe.accumulate)
        # Batches in each update of an epoch.
        self.group_sizes = [recipe.accumulate] * whole_groups + ([rest] if rest else [])
        self.steps_per_epoch = len(self.group_sizes)
        whole = recipe.epochs * self.steps_per_epoch
        self.total_steps = min(whole, recipe.steps or whole)
        self.epochs = -(-self.total_steps // self.steps_per_epoch)
        self.clock = metrics.StepClock()
        self.step = 0
        self.train_loss = float("nan")
        self.val_accuracy: float | None = None
        self.val_loss: float | None = None
        self.rate = learning_rate(recipe, topology.size, self.steps_per_epoch)
        self._epoch = 0
        self._unread: list[Tensor] = []  # losses still on the device
        self._epoch_loss = 0.0
        self._epoch_steps = 0

    @property
    def finished(self) -> bool:
        """Whether the last step has been taken."""
        return self.step >= self.total_steps

    def groups(self, epoch: int) -> Iterator[list[Batch]]:
        """This rank's batches of one epoch, one list an update, as many as there are steps left."""
        recipe, topology = self._recipe, self._topology
        left = self.total_steps - epoch * self.steps_per_epoch
        rank, size = topology.rank, topology.size
        shard = data_.epoch_batches(
            self._dataset.train, recipe.batch_size, recipe.seed, epoch, rank, size, recipe.data.augment
        )
        for size in self.group_sizes[:left]:
            yield list(itertools.islice(shard, size))

    def begin_epoch(self, epoch: int) -> None:
        """Start the clock. Epochs count from 0."""
        self._tell("input", self.step)
        self._epoch, self._epoch_loss, self._epoch_steps = epoch, 0.0, 0
        self.clock.resume()

    def begin_step(self) -> None:
        """Set the step's learning rate."""
        self._tell("train step", self.step)
        self._adapter.set_learning_rate(self._session, self.rate(self.step))

    def end_step(self, loss: Tensor) -> None:
        """Take the rank's mean loss of the step; every `log_every` steps write the mean over all ranks.

        Raises RunError where ranks have come to differ (`check_ranks`) or the line cannot be written.
        """
        self._tell("end of step", self.step)
        self._adapter.synchronize()
        self.clock.tick()
        self.step += 1
        self._unread.append(loss)
        if self._recipe.check_ranks and self.step % self._recipe.check_ranks == 0:
            self._tell("comparing ranks", self.step)
            check_ranks(self._adapter, self._session, self._topology, self.step)
            self.clock.resume()
        if self.step % self._recipe.log_every == 0:
            steps = len(self._unread)
            self._write(self._read_losses() / steps, self._speed(steps))
        self._tell("input", self.step)

    def end_epoch(self) -> None:
        """Evaluate and write the epoch's line. Raises RunError where that cannot be written."""
        self._read_losses()
        self.train_loss = self._epoch_loss / self._epoch_steps
        speed = self._speed(self._epoch_steps)
        self.val_accuracy, self.val_loss = self.evaluate()
        self._write(self.train_loss, speed, ends_epoch=True, val_accuracy=self.val_accuracy, val_loss=self.val_loss)
        if self._topology.is_root:
            accuracy = "" if self.val_accuracy is None else f", validation accuracy {self.val_accuracy:.4f}"
            print(
                f"epoch {self._epoch + 1}/{self.epochs}: loss {self.train_loss:.4f}, {speed:.1f} images/s{accuracy}",
                flush=True,
            )

    def evaluate(self) -> tuple[float | None, float | None]:
        """Accuracy (a fraction of 1) and mean cross-entropy over the validation split, as `evaluate` below."""
        split, batch_size = self._dataset.val, self._recipe.batch_size
        on_batch = partial(self._tell, "evaluation", self.step)
        return evaluate(self._adapter, self._session, split, batch_size, self._topology, on_batch)

    def _read_losses(self) -> float:
        """Fetch the losses left on the device; returns the sum over their steps of the mean loss over all ranks."""
        local = sum(float(self._adapter.to_numpy(loss).mean()) for loss in self._unread)
        mean = metrics.reduce_sums(self._adapter, loss=local)["loss"] / self._topology.size
        self._epoch_loss += mean
        self._epoch_steps += len(self._unread)
        self._unread.clear()
        return mean

    def images(self, first: int, end: int) -> int:
        """How many images all ranks together have seen in the updates from 0-based `first` to before `end`."""
        batches = sum(self.group_sizes[step % self.steps_per_epoch] for step in range(first, end))
        return batches * self._recipe.batch_size * self._topology.size

    def _speed(self, steps: int) -> float:
        """Images per second over all ranks in the last `steps` steps, by this rank's clock."""
        return self.images(self.step - steps, self.step) / sum(self.clock.seconds[-steps:])

    def _write(self, loss: float, speed: float, **rest: Any) -> None:
        self._metrics_file.write(
            MetricLine(
                step=self.step,
                total_steps=self.total_steps,
                epoch=self._epoch,
                loss=loss,
                learning_rate=self.rate(self.step - 1),
                images_per_second=speed,
                **rest,
            )
        )


def drive(adapter: Adapter, session: Session, loop: Loop) -> None:
    """The plain loop."""
    for epoch in range(loop.epochs):
        loop.begin_epoch(epoch)
        for group in loop.groups(epoch):
            loop.begin_step()
            loop.end_step(adapter.train_step(session, group))
        loop.end_epoch()


def check_ranks(adapter: Adapter, session: Session, topology: Topology, step: int) -> None:
    """Compare the weights of all ranks, bit by bit; collective. `step` counts finished updates.

    Raises RunError, the same on every rank, naming the ranks that differ from rank 0 and the first tensor that does.
    """
    parameters = parameters_of(adapter.state(session))
    mine = {name: digest({name: value}) for name, value in parameters.items()}
    everyone = adapter.allgather_object(mine, name="check_ranks")
    for name in mine:
        apart = [rank for rank in range(topology.size) if everyone[rank][name] != everyone[0][name]]
        if apart:
            ranks = f"rank{'s' if len(apart) > 1 else ''} {', '.join(map(str, apart))}"
            raise RunError(
                f"check_ranks: after step {step} the weights of {ranks} differ from rank 0's, first in {name}; "
                "expected the same bits everywhere"
            )


def evaluate(
    adapter: Adapter,
    session: Session,
    split: Split,
    batch_size: int,
    topology: Topology,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[float | None, float | None]:
    """Accuracy (a fraction of 1) and mean cross-entropy over all ranks, each sample counted once.

    None where the split is empty. No label smoothing. Collective: all ranks call it, all get the same figures.
    """
    correct, loss, count = 0, 0.0, 0
    for batch, valid in data_.evaluation_batches(split, batch_size, topology.rank, topology.size):
        on_batch()
        logits = adapter.eval_step(session, batch.images)[:valid]
        labels = batch.labels[:valid]
        correct += int(np.sum(logits.argmax(axis=1) == labels))
        loss += float(metrics.cross_entropy(logits, labels).sum())
        count += valid
    sums = metrics.reduce_sums(adapter, correct=correct, loss=loss, count=count)
    if sums["count"] == 0:
        return None, None
    return sums["correct"] / sums["count"], sums["loss"] / sums["count"]
