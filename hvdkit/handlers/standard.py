"""hvdkit's handlers: losses and metrics, comparisons of ranks, evaluation, checkpoints. `attach` has their order."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.core import metrics
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.step_plan import Progress, due
from hvdkit.core.tensors import Tensor
from hvdkit.errors import RunError
from hvdkit.heartbeat import DISK
from hvdkit.results.train import MetricLine, scores, shown_scores

if TYPE_CHECKING:
    from hvdkit.handlers.communication import BandwidthWatch
    from hvdkit.handlers.metrics_file import MetricsFile
    from hvdkit.handlers.weight_average import EpochAverage

Arrays = Mapping[str, np.ndarray]


def attach(
    run: Loop,
    metrics_file: MetricsFile | None = None,
    keep: Callable[[Progress, Arrays], None] | None = None,
    commit: Callable[[Progress], None] | None = None,
    asked_to_stop: Callable[[], bool] | None = None,
    of_task: Sequence[Handler] = (),
    resumed: Arrays | None = None,
    communication: BandwidthWatch | None = None,
) -> Loop:
    """Give a run hvdkit's handlers, and those `of_task`; returns the run.

    `metrics_file` is rank 0's. `keep` writes a checkpoint of the progress, with tensors that ranks have for themselves;
    `commit` keeps the state in memory; all ranks call both. If `asked_to_stop` returns true on any rank, an
    update within seconds raises Stopped. `resumed` is the state of the checkpoint from which the run continues.
    `communication` watches the collectives.

    The order is that in which ranks communicate. A task's own handlers see the validation, and may stop the run before
    the last checkpoint is written.
    """
    recipe, losses, average = run.recipe, Losses(run, resumed or {}), None
    run.handlers = [losses, *([communication] if communication else [])]
    # Imported where they are used: most runs do not need them.
    if recipe.check_ranks:
        from hvdkit.handlers.rank_checks import RankChecks

        run.handlers.append(RankChecks())
    if asked_to_stop:
        from hvdkit.handlers.stopping import Preemption

        run.handlers.append(Preemption(run.adapter, run.mesh.world, asked_to_stop, run.step))
    run.handlers.append(Evaluation())
    if recipe.average_weights:
        from hvdkit.handlers.weight_average import EpochAverage

        average = EpochAverage(run, measured)
        run.handlers.append(average)
    run.handlers.append(MetricsLog(losses, metrics_file, communication))
    if recipe.early_stopping:
        from hvdkit.handlers.stopping import Patience

        run.handlers.append(Patience(run, recipe.early_stopping))
    if of_task:
        from hvdkit.handlers.of_task import OfTask

        run.handlers.append(OfTask(of_task))
    if keep:
        run.handlers.append(Saving(losses, average, keep))
    if commit and recipe.elastic:
        run.handlers.append(Committing(losses, commit))
    return run


class Losses(Handler):
    """Each update's loss, which stays on the device until it is read: then its mean over ranks is in the progress.

    `resumed` may have the losses that a stopped run had not read (`handlers.unmerged`).
    """

    def __init__(self, run: Loop, resumed: Arrays) -> None:
        losses, counts = list[float](), list[float]()
        if resumed:
            from hvdkit.handlers.unmerged import restore

            losses, counts = restore(run.session, run.mesh, run.progress, resumed)
        self._unread: list[Tensor] = [run.adapter.from_numpy(np.array([loss])) for loss in losses]
        self.counts = counts  # of the same updates, if the loss is a sum and a count

    def on_step_end(self, run: Loop) -> None:
        self._unread.append(run.last_loss)
        if run.session.counting is not None and (count := run.session.counting.last()) is not None:
            self.counts.append(count)

    def on_epoch_end(self, run: Loop) -> None:
        self.read(run)
        run.progress.train_loss = run.progress.epoch_loss / max(1, run.progress.epoch_steps)

    def local(self, run: Loop) -> list[float]:
        """This rank's losses that are not read yet; of a pipeline the last stage's, collective over it."""
        values = [0.0 if loss is None else float(run.adapter.to_numpy(loss).mean()) for loss in self._unread]
        pipeline = run.session.pipeline
        return values if pipeline is None or not values else pipeline.from_last(values)

    def read(self, run: Loop) -> None:
        """Add the means over all ranks to the progress; collective. Raises RunError if one is no longer a number."""
        local, steps, progress = self.local(run), len(self._unread), run.progress
        if self.counts:
            mean = steps * self._mean_counted(run, local)
        else:
            mean = metrics.reduce_sums(run.adapter, run.mesh.data, loss=sum(local))["loss"] / run.mesh.data.size
        if not np.isfinite(mean):
            raise _ran_away(run, local)
        progress.line_loss += mean
        progress.line_steps += steps
        progress.epoch_loss += mean
        progress.epoch_steps += steps
        self._unread.clear()

    def _mean_counted(self, run: Loop, losses: list[float]) -> float:
        """The mean over updates of Σ sum / Σ count. Updates without a count get a warning. Raises RunError for none."""
        mine = np.array([np.multiply(losses, self.counts), self.counts], np.float64)
        (both,) = run.adapter.allreduce([run.adapter.from_numpy(mine)], run.mesh.data, op="sum", name="metrics.counted")
        sums, totals = run.adapter.to_numpy(both)
        self.counts.clear()
        some = totals != 0
        mean = float((sums[some] / totals[some]).mean()) if some.any() else math.nan
        first, progress, empty = run.step - len(losses) + 1, run.progress, np.flatnonzero(~some).tolist()
        if empty:
            steps = ", ".join(str(first + index) for index in empty[:9]) + (", …" if len(empty) > 9 else "")
            line = f"in step {steps} no target counts on any rank, so nothing is learned"
            if len(empty) < len(losses):
                run.warnings.append(line)
            elif progress.epoch_steps:
                mean = progress.epoch_loss / progress.epoch_steps
                run.warnings.append(line)
            else:
                raise RunError(f"loss: {line}; expected a count above 0 in each update: look at targets and labels")
        return mean


def _ran_away(run: Loop, losses: list[float]) -> RunError:
    """The error for losses, of the newest updates, that are no longer numbers on some rank; collective."""
    first = next((index for index, loss in enumerate(losses) if not np.isfinite(loss)), len(losses) - 1)
    mine = run.adapter.from_numpy(np.array([first], np.float64))
    (earliest,) = run.adapter.allreduce([mine], run.mesh.data, op="min", name="ran_away")
    run.phase("end of step")
    step = run.step - len(losses) + 1 + int(run.adapter.to_numpy(earliest)[0])
    remedy = "lower optimizer.learning_rate, or give schedule.warmup_epochs or optimizer.clip_norm"
    if step == 1:  # of the initial weights, so the learning rate is not the cause
        remedy = "look for NaN or infinity in the samples, and for log(0) or a division by 0 in the model or the loss"
    remedy = "; ".join([remedy, *run.warnings])
    rate = run.rate(step - 1)
    return RunError(f"the loss is no longer a number from step {step} on, learning rate {rate:.3g}; {remedy}")


class Evaluation(Handler):
    """Measures the task's metrics over the validation split."""

    def on_epoch_end(self, run: Loop) -> None:
        run.session.strategy.synchronize()
        merge_buffers(run)
        run.progress.validation, run.progress.average_validation = measured(run), {}
        run.progress.evaluated = True


def measured(run: Loop) -> dict[str, float]:
    """The means of the metrics by name, empty if the split is; collective. Raises RunError if one is not a number."""
    split, size, on_batch = run.dataset.val, run.recipe.batch_size, partial(run.phase, "evaluation")
    means = metrics.evaluate(run.adapter, run.session, run.task.metrics, split, size, run.mesh.data, on_batch)
    if lost := [name for name, value in means.items() if not np.isfinite(value)]:  # JSON cannot represent it
        raise RunError(
            f"the validation after step {run.step} is no longer a number ({', '.join(lost)}); lower "
            "optimizer.learning_rate, or use the checkpoint before"
        )
    return means


def merge_buffers(run: Loop) -> None:
    """Make one model of what ranks have changed in their buffers, and warn of it; collective."""
    if run.mesh.data.size > 1:
        from hvdkit.handlers import merging

        lines = merging.merge_buffers(run.session, run.mesh.data)
        every_stage = run.adapter.allgather_object(lines, run.mesh.pipeline, "merged")
        run.warn(line for of_stage in every_stage for line in of_stage)


class MetricsLog(Handler):
    """Writes a line of metrics.jsonl each `log_every` steps and at the end of each epoch, which it also prints."""

    def __init__(self, losses: Losses, file: MetricsFile | None, communication: BandwidthWatch | None = None) -> None:
        self._losses, self._file, self._communication = losses, file, communication

    def on_step_end(self, run: Loop) -> None:
        """Write the mean since the last line, if a line is due. Raises RunError if it cannot be written."""
        if due(run.recipe.log_every, run.step) or run.warnings:
            self._losses.read(run)
            progress = run.progress
            rate = self._communication and self._communication.mbit_per_s
            mean, speed = progress.line_loss / progress.line_steps, _speed(run, progress.line_steps)
            self._write(run, mean, speed, communication_mbit_per_s=rate)
            progress.line_loss, progress.line_steps = 0.0, 0

    def on_epoch_end(self, run: Loop) -> None:
        """Write and print the epoch's means. Raises RunError if they cannot be written."""
        progress, speed = run.progress, _speed(run, run.progress.epoch_steps)
        both = progress.validation, progress.average_validation
        rate = self._communication and self._communication.epoch_mbit_per_s
        self._write(run, progress.train_loss, speed, ends_epoch=True, communication_mbit_per_s=rate, **scores(*both))
        if run.is_root:
            summary = f"loss {progress.train_loss:.4f}, {speed:.1f} {run.task.unit}/s{shown_scores(*both)}"
            print(f"epoch {run.epoch + 1}/{run.epochs}: {summary}", flush=True)

    def _write(self, run: Loop, loss: float, speed: float, **rest: Any) -> None:
        warnings, run.warnings, run.notes = [*run.warnings, *run.notes], [], []
        if self._file is None:
            return
        line = MetricLine(
            step=run.step,
            total_steps=run.total_steps,
            epoch=run.epoch,
            loss=loss,
            learning_rate=run.learning_rate,
            images_per_second=speed,
            bytes_per_step=run.session.bytes_per_step,
            rss_mib=_rss_mib(),
            unit=run.task.unit,
            warnings=warnings or None,
            **rest,
        )
        self._file.write(line)


def _rss_mib() -> float | None:
    """The resident memory of this process now, in MiB; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize() / 2**20


def _speed(run: Loop, steps: int) -> float:
    """The task's units a second over all ranks in the last `steps` steps of this process, measured by this rank."""
    seconds = run.clock.seconds[-steps:]
    return run.task.units * sum(run.step_samples[-steps:]) / sum(seconds) if seconds else 0.0


class Saving(Handler):
    """Has checkpoints written by `keep`: by `every_steps` and `every_epochs`, at the end, and before ranks leave."""

    def __init__(self, losses: Losses, average: EpochAverage | None, keep: Callable[[Progress, Arrays], None]) -> None:
        self._losses, self._average, self._keep = losses, average, keep

    def on_step_end(self, run: Loop) -> None:
        settings = run.recipe.checkpoint
        planned = settings is not None and due(settings.every_steps, run.step)
        if planned or run.leaving:
            self._save(run, unscheduled=not planned)

    def on_epoch_end(self, run: Loop) -> None:
        settings = run.recipe.checkpoint
        if settings and (due(settings.every_epochs, run.epoch + 1) or run.finished):
            if not run.plan.group_sizes(run.progress.samples):  # false if the epoch has ended early
                run.enter_epoch(run.epoch + 1)
            self._save(run)

    def _save(self, run: Loop, unscheduled: bool = False) -> None:
        """Write a checkpoint. One that is `unscheduled`, as ranks were asked to stop, also has what each rank has not
        merged yet, so that a resumed run continues as if it had not been stopped."""
        run.phase("checkpoint")
        ranks_own: Arrays = {}
        if unscheduled:
            from hvdkit.handlers.unmerged import unmerged  # most runs do not need it

            local = self._losses.local(run), self._losses.counts
            ranks_own = unmerged(run.session, run.mesh, run.progress, *local)
        run.session.strategy.settle()
        self._losses.read(run)
        merge_buffers(run)
        if self._average:
            self._average.settle()
        if not run.is_root:
            run.phase(DISK)
        self._keep(run.progress, ranks_own)
        # Only rank 0 copies and writes; the others wait for it here, so that their next step's time excludes the wait.
        metrics.reduce_sums(run.adapter, run.mesh.world, kept=1.0)
        run.clock.resume()


class Committing(Handler):
    """Has the state of an elastic run kept in memory by `commit`, each `commit_every` steps."""

    def __init__(self, losses: Losses, commit: Callable[[Progress], None]) -> None:
        self._losses, self._commit = losses, commit

    def on_step_end(self, run: Loop) -> None:
        assert run.recipe.elastic
        if due(run.recipe.elastic.commit_every, run.step):
            run.phase("commit")
            run.session.strategy.settle()
            self._losses.read(run)
            self._commit(run.progress)
