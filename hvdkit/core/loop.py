"""The training loop: epochs, and groups of batches of which each makes an update. Handlers do what happens around them.

Keras alone has a loop of its own (`model.fit`), which calls the same methods from a callback, but for a pipeline.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from hvdkit.core import trace_events
from hvdkit.core.group import Mesh
from hvdkit.core.session import Session
from hvdkit.core.step_plan import Progress, StepPlan
from hvdkit.core.tensors import Tensor
from hvdkit.data.batches import Batch, Dataset
from hvdkit.errors import RequestError, Stopped
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.task import Task


class Handler:
    """What happens around the steps of a run. A subclass defines what it needs of these methods, which do nothing.

    All ranks call each of them at the same steps, so they may use collectives. docs/reference/own-model.md lists what a
    handler of a task may use of `run`.
    """

    def on_epoch_begin(self, run: Loop) -> None:
        """Before the first step of epoch `run.epoch`, which counts from 0."""

    def on_step_end(self, run: Loop) -> None:
        """After update `run.step`, which counts from 1. It is timed as a part of the next step."""

    def on_epoch_end(self, run: Loop) -> None:
        """After the last step of epoch `run.epoch`."""


class Driver(ABC):
    """A `core.trainable.Trainable` whose framework has a training loop of its own."""

    @abstractmethod
    def drive(self, loop: Loop) -> None:
        """Train as `Loop.run` does: by `begin_epoch`, then `begin_step`, the update and `end_step` for each of
        `groups`, then `end_epoch`."""


class StepClock:
    """Seconds from the end of one step to the end of the next, including input, without the pauses between epochs.

    `cpu_seconds` is the CPU time of all threads of this process in the same steps. `cpu` reads
    it. `last_ns` is the time (`time.perf_counter_ns`) of the last start or end of a step, and `first_at` the wall-clock
    time (`time.time`) at the end of the first step.
    """

    def __init__(self, cpu: Callable[[], float] = time.process_time) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.first_at: float | None = None
        self.cpu = cpu
        self.resume()

    def resume(self) -> None:
        """Start or restart the clock; the time before this call counts to no step."""
        self.last_ns, self._last_cpu = time.perf_counter_ns(), self.cpu()
        trace_events.note(trace_events.OPEN, self.last_ns)

    def tick(self) -> None:
        """Record the end of a step."""
        now, cpu = time.perf_counter_ns(), self.cpu()
        self.seconds.append((now - self.last_ns) / 1e9)
        self.cpu_seconds.append(cpu - self._last_cpu)
        self.last_ns, self._last_cpu = now, cpu
        trace_events.note(trace_events.END, now)
        if self.first_at is None:
            self.first_at = time.time()


class Loop:
    """A run of a recipe: its plan, its progress, and what happens next.

    It starts with epoch `progress.epoch`. A group here is the batches of one update, `accumulate` of
    them; the last group of an epoch has the rest.
    `plan` counts updates; `group_sizes` are the batches of each update left in the epoch. `handlers` are called in this
    order. `report(phase, step)` is called with the rank's current phase and its number of finished updates. Raises
    RequestError as `StepPlan` does.
    """

    def __init__(
        self,
        session: Session,
        task: Task,
        recipe: Recipe,
        mesh: Mesh,
        dataset: Dataset,
        report: Callable[[str, int], None] = lambda phase, step: None,
        progress: Progress | None = None,
    ) -> None:
        self.session, self.adapter, self.task = session, session.adapter, task
        self.recipe, self.mesh, self.dataset, self._report = recipe, mesh, dataset, report
        session.step.on_batch = lambda: self.phase("train step")  # an update of many batches is no hang
        self.handlers: list[Handler] = []
        self.plan = StepPlan(recipe, len(dataset.train), mesh.data.size)
        self.total_steps, self.epochs, self.rate = self.plan.total_steps, self.plan.epochs, self.plan.rate
        self.progress = progress or Progress()
        if self.progress.samples:  # started with updates of another size, for which `steps` allowed more epochs
            self.epochs = max(self.epochs, self.progress.epoch + 1)
        if self.progress.step > self.total_steps:
            raise RequestError(
                f"epochs, steps: the recipe ends at step {self.total_steps}, the checkpoint is at {self.progress.step}"
            )
        self.group_sizes: list[int] = []  # batches in each remaining update of the epoch
        self.step_samples: list[int] = []  # samples of all ranks, for each update in clock.seconds
        self.clock = StepClock(self.adapter.cpu_seconds)
        self.last_loss: Tensor = None  # of the last update on this rank; the device may still be computing it
        self.leaving = False  # whether a rank was asked to stop: the same on all ranks
        self.stopped_early: str | None = None  # why no epoch follows, in a line: the same on all ranks
        self.stop_reason: str | None = None  # why this rank's handlers want no further step
        self.warnings: list[str] = []  # for the next line of metrics.jsonl, which comes at once; the same on all ranks
        self.notes: list[str] = []  # for the next line too, which comes when it is due
        self._said: set[str] = set()  # of the warnings
        self.enter_epoch(self.progress.epoch)

    def train(self) -> None:
        """Train to the end: by `run`, or by the framework's own loop where it has one."""
        trainable = self.session.trainable
        if isinstance(trainable, Driver):
            trainable.drive(self)
        else:
            self.run()

    def run(self) -> None:
        """Epochs, and groups of batches: each group is one update."""
        for epoch in range(self.progress.epoch, self.epochs):
            if self.stopped_early:
                break
            self.begin_epoch(epoch)
            for group in self.groups(epoch):
                self.begin_step()
                self.end_step(self.session.train_step(group))
                if self.stopped_early:
                    break
            self.end_epoch()

    def begin_epoch(self, epoch: int) -> None:
        """Prepare an epoch: its groups of batches, the strategy and the clock. Epochs count from 0."""
        self.phase("input")
        self.enter_epoch(epoch)
        self.session.strategy.begin_epoch(epoch)
        for handler in self.handlers:
            handler.on_epoch_begin(self)
        self.clock.resume()

    def begin_step(self) -> None:
        """Prepare an update: its learning rate, and the strategy."""
        trace_events.mark(trace_events.STEP)
        self.phase("train step")
        self.session.set_learning_rate(self.rate(self.step))
        self.session.strategy.begin_step(self.step, self.plan.steps_per_epoch)

    def end_step(self, loss: Tensor | None) -> None:
        """Count an update, of which `loss` is this rank's mean, if it has one, and call the handlers.

        Raises Stopped if they leave.
        """
        self.phase("end of step")
        self.session.strategy.end_step()
        if not self.session.strategy.by_layer:  # else updates are left, or queued
            self.adapter.synchronize()
        self.clock.tick()
        self._count(loss)
        for handler in self.handlers:
            handler.on_step_end(self)
        if self.leaving:
            self.session.complete()
            raise Stopped(f"stopped after step {self.step} of {self.total_steps}, as asked")
        self.phase("input")

    def end_epoch(self) -> None:
        """Call the handlers after an epoch's last step."""
        self.session.complete()
        for handler in self.handlers:
            handler.on_epoch_end(self)

    def _count(self, loss: Tensor | None) -> None:
        progress, self.last_loss = self.progress, loss
        self.step_samples.append(self.group_sizes[self._step_in_epoch] * self.plan.global_batch)
        self._step_in_epoch += 1
        progress.step += 1
        progress.evaluated = False
        progress.samples += self.step_samples[-1]

    def enter_epoch(self, epoch: int) -> None:
        """Set `group_sizes`; an interrupted epoch continues where it stopped."""
        if epoch != self.progress.epoch:
            self.progress.epoch, self.progress.samples = epoch, 0
            self.progress.epoch_loss, self.progress.epoch_steps = 0.0, 0
        self.group_sizes = self.plan.group_sizes(self.progress.samples)[: max(0, self.total_steps - self.step)]
        self._step_in_epoch = 0

    def groups(self, epoch: int) -> Iterator[list[Batch]]:
        """This rank's batches for the rest of an epoch, one list per update."""
        is_current = self.progress.epoch == epoch
        samples, sizes = (self.progress.samples, self.group_sizes) if is_current else (0, None)
        return self.plan.groups(self.dataset.train, self.mesh.shard, epoch, samples, sizes)

    # For handlers

    @property
    def step(self) -> int:
        """The number of finished updates."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.progress.epoch

    @property
    def loss(self) -> float:
        """This rank's mean loss of the last update; waits for the device."""
        return float(self.adapter.to_numpy(self.last_loss).mean())

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update."""
        return self.rate(self.step - 1)

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, which alone prints and writes."""
        return self.mesh.is_root

    @property
    def finished(self) -> bool:
        """Whether the last step has been taken, or training has stopped early."""
        return self.step >= self.total_steps or self.stopped_early is not None

    def stop(self, why: str) -> None:
        """End training early, for a reason in a line. One rank's call is enough.

        All ranks stop after the same update, a multiple of `log_every`, or at the end of the epoch. The model is then
        evaluated and kept, as after the last step.
        """
        self.stop_reason = why

    def phase(self, name: str) -> None:
        """Report what this rank does now."""
        self._report(name, self.step)

    def warn(self, lines: Iterable[str]) -> None:
        """Warn of each line once: in the output, and in metrics.jsonl at once. All ranks must give the same lines."""
        new = [line for line in dict.fromkeys(lines) if line not in self._said]
        self._said.update(new)
        self.warnings += new
        for line in new if self.is_root else []:  # the stream may be closed, even for an empty text
            print(f"warning: {line}", flush=True)
