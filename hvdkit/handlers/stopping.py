"""Handlers that end training before its last step: a rank was asked to stop, or validation no longer improves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdkit.core import metrics
from hvdkit.core.group import Group
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.seam import Adapter
from hvdkit.core.step_plan import Progress
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import EarlyStopping

if TYPE_CHECKING:  # the command line checks recipes and starts without NumPy
    from hvdkit.tasks.task import Task

LOOK_S = 5.0  # between two checks whether a rank was asked to stop
_GROWTH = 8  # the most by which the interval in steps grows between two checks: the first steps may be quick
_LOWER_IS_BETTER = {"loss", "perplexity", "bits_per_byte"}


class Preemption(Handler):
    """All ranks leave if any rank was asked to: they check it at the same steps.

    They check after the next update and then about every LOOK_S seconds, or after each update if updates take longer.

    `step` is the number of finished updates; `asked()` says whether this rank was asked to stop.
    """

    def __init__(self, adapter: Adapter, world: Group, asked: Callable[[], bool], step: int) -> None:
        self._adapter, self._world, self._asked = adapter, world, asked
        self._last, self._next = step, step + 1

    def on_step_end(self, run: Loop) -> None:
        run.leaving = self.wanted(run.step, run.clock.seconds)

    def wanted(self, step: int, seconds: list[float]) -> bool:
        """Whether any rank was asked to stop; collective at the steps that check, False at the others.

        `seconds` holds the durations of the updates up to `step`, at least those since the last check.
        """
        if step < self._next:
            return False
        steps = step - self._last
        # Sums of whole microseconds are exact in any order, so all ranks compute the same next step.
        taken_us = round(1e6 * sum(seconds[-steps:]))
        sums = metrics.reduce_sums(self._adapter, self._world, stop=float(self._asked()), taken_us=taken_us)
        fitting = int(1e6 * LOOK_S * steps * self._world.size / max(1.0, sums["taken_us"]))
        self._last, self._next = step, step + max(1, min(fitting, _GROWTH * steps))
        return sums["stop"] > 0


class Patience(Handler):
    """Stops a run whose validation has not improved for some epochs."""

    def __init__(self, run: Loop, settings: EarlyStopping) -> None:
        self._settings = settings
        if not run.progress.samples:  # it may have stopped before
            run.stopped_early = stopped_early(settings, run.progress, run.epoch, run.epochs)

    def on_epoch_end(self, run: Loop) -> None:
        note_epoch(self._settings, run.task, run.progress)
        why = stopped_early(self._settings, run.progress, run.epoch + 1, run.epochs)
        run.stopped_early = run.stopped_early or why


def watched(settings: EarlyStopping, task: Task) -> str:
    """The metric to watch, with a minus sign where lower is better. Raises RequestError if it is unknown, or must
    have the sign."""
    name = settings.metric or task.best
    metrics_of = task.metrics
    known = list(metrics_of.means(dict.fromkeys(metrics_of.names, (0.0, 1.0)), 1))
    known += ["loss"] if task.loss is not None and "loss" not in known else []
    if name.removeprefix("-") not in known:
        raise RequestError(
            f"early_stopping.metric: expected one of {', '.join(known)}, with a minus sign where lower is better, "
            f"got {name}"
        )
    if f"-{name}" == task.best or name in _LOWER_IS_BETTER:
        raise RequestError(f"early_stopping.metric: expected -{name}, as lower is better, got {name}")
    return name


def check_early_stopping(settings: EarlyStopping, task: Task, samples: int) -> None:
    """Raise RequestError if the metric is unknown, or there is nothing to measure it on: no validation `samples`."""
    watched(settings, task)
    if not samples:
        raise RequestError(
            "early_stopping: expected validation samples, got none; hold some out, or give early_stopping=null"
        )


def note_epoch(settings: EarlyStopping, task: Task, progress: Progress) -> None:
    """Take the validation at the end of an epoch into the progress: the best value, and the epochs up to it."""
    name, done = watched(settings, task), progress.epoch + 1
    sign = -1 if name.startswith("-") else 1
    value = progress.judged[name.removeprefix("-")]
    if progress.watched != name or progress.best is None or sign * (value - progress.best) > settings.min_delta:
        progress.watched, progress.best, progress.best_epoch = name, value, done


def stopped_early(settings: EarlyStopping, progress: Progress, done: int, epochs: int) -> str | None:
    """Why training ends after `done` of `epochs` epochs, in a line; None if it continues."""
    if progress.best is None or done - progress.best_epoch < settings.patience or done >= epochs:
        return None
    by = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
    return (
        f"stopped early after epoch {done} of {epochs}: {progress.watched.removeprefix('-')} has not improved{by} "
        f"since epoch {progress.best_epoch}"
    )
