"""The training loop as a set of hooks, called by `drive` for most frameworks and by a callback for Keras."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.core import metrics
from hvdkit.core.group import Mesh
from hvdkit.core.heartbeat import DISK
from hvdkit.core.metrics import evaluate as evaluate  # users import it from here
from hvdkit.core.seam import Adapter, Hooks, Tensor
from hvdkit.core.state import digest
from hvdkit.core.step_plan import Progress, StepPlan
from hvdkit.data.batches import Batch, Dataset
from hvdkit.errors import RequestError, RunError, Stopped
from hvdkit.recipe.schema import Recipe
from hvdkit.results.train import MetricLine, scores, shown_scores
from hvdkit.tasks.task import Task

if TYPE_CHECKING:
    from hvdkit.core.epoch_average import EpochAverage
    from hvdkit.core.session import Session


class Loop:
    """The hooks of one run, independent of the framework's training loop.

    The framework's loop starts with epoch `progress.epoch` and calls begin_epoch, then for each of `groups`
    begin_step, the update and end_step, then end_epoch. A group has `accumulate` batches; the last group of an epoch
    has the remaining ones. `plan` counts updates; `group_sizes` are the batches of each update left in the epoch.
    `report(phase, step)` is called with the rank's current phase and its number of finished updates. `keep` writes a
    checkpoint of the progress, with tensors that ranks have for themselves (`own`), `commit` keeps it in memory; all
    ranks call both. If `asked_to_stop` returns true on any rank, an update within seconds raises Stopped. Raises
    RequestError as `StepPlan` does.
    """

    def __init__(
        self,
        adapter: Adapter,
        session: Session,
        task: Task,
        recipe: Recipe,
        mesh: Mesh,
        dataset: Dataset,
        metrics_file: metrics.MetricsFile,
        report: Callable[[str, int], None] = lambda phase, step: None,
        progress: Progress | None = None,
        keep: Callable[..., None] | None = None,
        commit: Callable[[Progress], None] | None = None,
        asked_to_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._adapter, self._session = adapter, session
        self._task, self._recipe, self._mesh, self._dataset = task, recipe, mesh, dataset
        self._metrics_file, self._report = metrics_file, report
        self._keep, self._commit, self._strategy = keep, commit, session.strategy
        self._unchecked = False  # whether to compare the ranks when their weights are next equal
        self.plan = StepPlan(recipe, len(dataset.train), mesh.data.size)
        self.total_steps, self.epochs, self.rate = self.plan.total_steps, self.plan.epochs, self.plan.rate
        self.progress = progress or Progress()
        if self.progress.samples:  # started with updates of another size, for which `steps` allowed more epochs
            self.epochs = max(self.epochs, self.progress.epoch + 1)
        self._stopping = None
        if asked_to_stop:
            from hvdkit.core.stopping import Stopping  # a run without checkpoints does not need it

            self._stopping = Stopping(adapter, mesh.world, asked_to_stop, self.progress.step)
        self.stopped_early: str | None = None
        if self.progress.step > self.total_steps:
            raise RequestError(
                f"epochs, steps: the recipe ends at step {self.total_steps}, the checkpoint is at {self.progress.step}"
            )
        self.group_sizes: list[int] = []  # batches in each remaining update of the epoch
        self.step_samples: list[int] = []  # samples of all ranks, for each update in clock.seconds
        self.clock = metrics.StepClock(recipe.warmup_steps, getattr(adapter, "cpu_seconds", time.process_time))
        self._unread: list[Tensor] = []  # losses still on the device
        self._counts: list[float] = []  # of the same updates, if the loss is a sum and a count
        self._average: EpochAverage | None = None
        if recipe.average_weights:
            from hvdkit.core.epoch_average import EpochAverage

            on_batch = partial(self._report, "average of the weights", 0)
            self._average = EpochAverage(session, mesh, self.plan, dataset.train, self._measure, on_batch)
        self.warnings: list[str] = []  # for the next line of metrics.jsonl, which comes at once; the same on all ranks
        self.notes: list[str] = []  # for the next line too, which comes when it is due
        self._said: set[str] = set()  # of these
        self.enter_epoch(self.progress.epoch)
        if recipe.early_stopping and not self.progress.samples:  # it may have stopped before
            self._look_whether_to_stop(self.progress.epoch)

    @property
    def finished(self) -> bool:
        """Whether the last step has been taken, or training has stopped early."""
        return self.progress.step >= self.total_steps or self.stopped_early is not None

    def _look_whether_to_stop(self, done: int) -> None:
        from hvdkit.core.stopping import stopped_early  # most runs do not need it

        self.stopped_early = stopped_early(self._recipe.early_stopping, self.progress, done, self.epochs)

    def enter_epoch(self, epoch: int) -> None:
        """Set `group_sizes`; an interrupted epoch continues where it stopped."""
        if epoch != self.progress.epoch:
            self.progress.epoch, self.progress.samples = epoch, 0
            self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0
        self.group_sizes = self.plan.group_sizes(self.progress.samples)[: max(0, self.total_steps - self.progress.step)]
        self._step_in_epoch = 0

    def groups(self, epoch: int) -> Iterator[list[Batch]]:
        """This rank's batches for the rest of an epoch, one list per update."""
        left = self.progress.epoch == epoch
        samples, sizes = (self.progress.samples, self.group_sizes) if left else (0, None)
        return self.plan.groups(self._dataset.train, self._mesh.shard, epoch, samples, sizes)

    def begin_epoch(self, epoch: int) -> None:
        """Prepare an epoch: its groups of batches, the strategy and the clock. Epochs count from 0."""
        self._report("input", self.progress.step)
        self.enter_epoch(epoch)
        self._strategy.begin_epoch(epoch)
        self.clock.resume()

    def begin_step(self) -> None:
        """Prepare an update: its learning rate, and the strategy."""
        self._report("train step", self.progress.step)
        self._session.set_learning_rate(self.rate(self.progress.step))
        self._strategy.begin_step(self.progress.step, self.plan.steps_per_epoch)

    def end_step(self, loss: Tensor) -> None:
        """Take the rank's mean loss of the step; every `log_every` steps write the mean over all ranks.

        Raises Stopped if a rank was asked to stop, after a checkpoint if the recipe has them. Raises RunError if the
        ranks' weights differ (`check_ranks`) or a file cannot be written.
        """
        self._report("end of step", self.progress.step)
        self._strategy.end_step()
        self._adapter.synchronize()
        self.clock.tick()
        progress = self.progress
        self.step_samples.append(self.group_sizes[self._step_in_epoch] * self.plan.global_batch)
        self._step_in_epoch += 1
        progress.step += 1
        progress.evaluated = False
        progress.samples += self.step_samples[-1]
        self._unread.append(loss)
        if self._session.counting is not None and (count := self._session.counting.last()) is not None:
            self._counts.append(count)
        self._unchecked |= _due(self._recipe.check_ranks, progress.step)
        if self._unchecked and not self._strategy.diverged:
            self._unchecked = False
            self._report("comparing ranks", progress.step)
            check_ranks(self._adapter, self._session, self._mesh, progress.step)  # timed as part of the next step
        stopping = bool(self._stopping and self._stopping.wanted(progress.step, self.clock.seconds))
        if _due(self._recipe.log_every, progress.step) or self.warnings:
            self._read_losses()
            self._write(progress.line_loss / progress.line_steps, self._speed(progress.line_steps))
            progress.line_loss, progress.line_steps = 0.0, 0
        settings = self._recipe.checkpoint
        if stopping or (settings and _due(settings.every_steps, progress.step)):
            self._checkpoint(between=not (settings and _due(settings.every_steps, progress.step)))
        elastic = self._recipe.elastic
        if self._commit and elastic and _due(elastic.commit_every, progress.step):
            self._report("commit", progress.step)
            self._strategy.settle()
            self._read_losses()
            self._commit(progress)  # timed as part of the next step
        if stopping:
            raise Stopped(f"stopped after step {progress.step} of {self.total_steps}, as asked")
        self._report("input", progress.step)

    def end_epoch(self) -> None:
        """Evaluate, write the epoch's line, and write a checkpoint if one is due. Raises RunError if writing fails."""
        self._read_losses()
        progress = self.progress
        progress.train_loss = progress.epoch_loss / max(1, progress.epoch_steps)
        speed = self._speed(progress.epoch_steps)
        progress.validation = self.evaluate()
        progress.average_validation = self._average.end_epoch(progress) if self._average else {}
        progress.evaluated = True
        both = progress.validation, progress.average_validation
        self._write(progress.train_loss, speed, ends_epoch=True, **scores(*both))
        if self._mesh.is_root:
            summary = f"loss {progress.train_loss:.4f}, {speed:.1f} {self._task.unit}/s"
            summary += shown_scores(*both)
            print(f"epoch {progress.epoch + 1}/{self.epochs}: {summary}", flush=True)
        if self._recipe.early_stopping:
            from hvdkit.core.stopping import note_epoch

            note_epoch(self._recipe.early_stopping, self._task, progress)
            self._look_whether_to_stop(progress.epoch + 1)
        settings = self._recipe.checkpoint
        if settings and (_due(settings.every_epochs, progress.epoch + 1) or self.finished):
            if not self.plan.group_sizes(progress.samples):  # false if `steps` ended the epoch early
                self.enter_epoch(progress.epoch + 1)
            self._checkpoint()

    def evaluate(self) -> dict[str, float]:
        """The means of the task's metrics over the validation split, by name; empty if the split is."""
        self._strategy.synchronize()
        self._merge_buffers()
        return self._measure()

    def _measure(self) -> dict[str, float]:
        split, batch_size = self._dataset.val, self._recipe.batch_size
        on_batch = partial(self._report, "evaluation", self.progress.step)
        metrics_of, group = self._task.metrics, self._mesh.data
        found = evaluate(self._adapter, self._session, metrics_of, split, batch_size, group, on_batch)
        if lost := [name for name, value in found.items() if not np.isfinite(value)]:  # JSON cannot represent it
            raise RunError(
                f"the validation after step {self.progress.step} is no longer a number ({', '.join(lost)}); lower "
                "optimizer.learning_rate, or use the checkpoint before"
            )
        return found

    def continue_from(self, state: Mapping[str, np.ndarray]) -> None:
        """Take on what a checkpoint's `state` has of this rank, if the run was stopped between two checkpoints."""
        if state:
            from hvdkit.core.unmerged import restore

            losses, counts = restore(self._adapter, self._session, self._mesh, self.progress, state)
            self._unread = [self._adapter.from_numpy(np.array([loss])) for loss in losses]
            self._counts = counts

    def _checkpoint(self, between: bool = False) -> None:
        """Write a checkpoint. One `between` those of a run that is not stopped has what each rank would have there."""
        if self._keep is None:
            return
        self._report("checkpoint", self.progress.step)
        own: dict[str, np.ndarray] = {}
        if between:
            from hvdkit.core.unmerged import unmerged  # most runs do not need it

            losses, counts = self._local_losses(), self._counts
            own = unmerged(self._adapter, self._session, self._mesh, self.progress, losses, counts)
        self._strategy.settle()
        self._read_losses()
        self._merge_buffers()
        if self._average:
            self._average.settle()
        if not self._mesh.is_root:
            self._report(DISK, self.progress.step)
        self._keep(self.progress, **({"own": own} if own else {}))
        # Only rank 0 copies and writes; the others wait for it here, so that their next step's time excludes the wait.
        metrics.reduce_sums(self._adapter, self._mesh.world, kept=1.0)
        self.clock.resume()

    def _merge_buffers(self) -> None:
        found = self._session.merge_buffers(self._mesh.data) if self._mesh.data.size > 1 else []
        new = [line for line in found if line not in self._said]
        self._said.update(new)
        self.warnings += new
        for line in new if self._mesh.is_root else []:  # the stream may be closed, even for an empty text
            print(f"warning: {line}", flush=True)

    def _read_losses(self) -> None:
        """Fetch the losses left on the device, averaged over all ranks."""
        local, steps = self._local_losses(), len(self._unread)
        if self._counts:
            mean = steps * self._mean_counted(local)
        else:
            data = self._mesh.data
            mean = metrics.reduce_sums(self._adapter, data, loss=sum(local))["loss"] / data.size
        if not np.isfinite(mean):
            raise self._ran_away(local)
        self.progress.line_loss += mean
        self.progress.line_steps += steps
        self.progress.epoch_loss += mean
        self.progress.epoch_steps += steps
        self._unread.clear()

    def _local_losses(self) -> list[float]:
        return [float(self._adapter.to_numpy(loss).mean()) for loss in self._unread]

    def _mean_counted(self, losses: list[float]) -> float:
        """The mean over updates of Σ sum / Σ count. Updates without a count get a warning. Raises RunError for none."""
        from hvdkit.core.counting import over_ranks

        mean, empty = over_ranks(self._adapter, self._mesh.data, losses, self._counts)
        self._counts.clear()
        first, progress = self.progress.step - len(losses) + 1, self.progress
        if empty:
            steps = ", ".join(str(first + place) for place in empty[:9]) + (", …" if len(empty) > 9 else "")
            told = f"in step {steps} no target counts on any rank, so nothing is learned"
            if len(empty) < len(losses):
                self.warnings.append(told)
            elif progress.epoch_steps:
                mean = progress.epoch_loss / progress.epoch_steps
                self.warnings.append(told)
            else:
                raise RunError(f"loss: {told}; expected a count above 0 in each update: look at targets and labels")
        return mean

    def _ran_away(self, losses: list[float]) -> RunError:
        """The error for losses, of the newest updates, that are no longer numbers on some rank; collective."""
        first = next((place for place, loss in enumerate(losses) if not np.isfinite(loss)), len(losses) - 1)
        mine = self._adapter.from_numpy(np.array([first], np.float64))
        (earliest,) = self._adapter.allreduce([mine], self._mesh.data, op="min", name="ran_away")
        self._report("end of step", self.progress.step)
        step = self.progress.step - len(losses) + 1 + int(self._adapter.to_numpy(earliest)[0])
        remedy = "lower optimizer.learning_rate, or give schedule.warmup_epochs or optimizer.clip_norm"
        if step == 1:  # of the initial weights, so the learning rate is not the cause
            remedy = (
                "look for NaN or infinity in the samples, and for log(0) or a division by 0 in the model or the loss"
            )
        remedy = "; ".join([remedy, *self.warnings])
        rate = self.rate(step - 1)
        return RunError(f"the loss is no longer a number from step {step} on, learning rate {rate:.3g}; {remedy}")

    def _speed(self, steps: int) -> float:
        """The task's units a second over all ranks in the last `steps` steps of this process, measured by this rank."""
        seconds = self.clock.seconds[-steps:]
        return self._task.units * sum(self.step_samples[-steps:]) / sum(seconds) if seconds else 0.0

    def _write(self, loss: float, speed: float, **rest: Any) -> None:
        warnings, self.warnings, self.notes = [*self.warnings, *self.notes], [], []
        self._metrics_file.write(
            MetricLine(
                step=self.progress.step,
                total_steps=self.total_steps,
                epoch=self.progress.epoch,
                loss=loss,
                learning_rate=self.rate(self.progress.step - 1),
                images_per_second=speed,
                bytes_per_step=self._strategy.bytes_per_step,
                rss_mib=metrics.rss_mib(),
                unit=self._task.unit,
                warnings=warnings or None,
                **rest,
            )
        )


def _due(every: int, count: int) -> bool:
    return every > 0 and count % every == 0


def drive(session: Session, loop: Hooks) -> None:
    """Train: the loop over epochs and updates that calls the hooks."""
    for epoch in range(loop.progress.epoch, loop.epochs):
        if loop.stopped_early:
            break
        loop.begin_epoch(epoch)
        for group in loop.groups(epoch):
            loop.begin_step()
            loop.end_step(session.train_step(group))
        loop.end_epoch()


def check_ranks(adapter: Adapter, session: Session, mesh: Mesh, step: int) -> None:
    """Compare the weights of all ranks, bit by bit; collective. `step` counts finished updates.

    Raises RunError, the same on every rank, naming the ranks that differ from rank 0 and the first tensor that does.
    """
    mine = {name: digest([(name, array)]) for name, array in session.model_arrays() if name in session.shapes}
    everyone = adapter.allgather_object((mesh.data.root, mine), mesh.world, name="check_ranks")[: mesh.world.size]
    for root in dict.fromkeys(root for root, _ in everyone):  # of each group that holds the same parameters
        for name, expected in everyone[root][1].items():
            differing = [rank for rank, (of, held) in enumerate(everyone) if of == root and held.get(name) != expected]
            if differing:
                ranks = f"rank{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))}"
                raise RunError(
                    f"check_ranks: after step {step} the weights of {ranks} differ from rank {root}'s, first in "
                    f"{name}; expected the same bits everywhere"
                )
