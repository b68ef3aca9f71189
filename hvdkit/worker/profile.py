"""One rank of `hvdkit profile`: steps without and with trace events in alternation, detailed steps, single collectives.

Rank 0 gathers the measurements in a `recording.RunRecord` and writes it next to Horovod's timeline.
`hvdkit.profiling` makes a profile of both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.group import HOST, threads_per_rank
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.step_plan import StepPlan
from hvdkit.core.trace_events import Mark
from hvdkit.files import write_atomic
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import Recipe
from hvdkit.results.recording import TRACED, Kind, RankRecord, RunRecord, Samples, StepRecord, TensorRecord
from hvdkit.worker import network_interface, tuning
from hvdkit.worker.measurement import peak_rss_mib
from hvdkit.worker.setup import RankScript, Setup, start

RECORD, TIMELINE, OWN = "record.json", "timeline.json", "own-profile"
TURNS = 4  # of plain steps, and as many of steps with trace events
LEAST_STEPS = 2 * TURNS
CLOCK_SAMPLES = 25  # small collectives that are used to compare the ranks' clocks
PROBE_BYTES = [4 * 8**power for power in range(8)]  # 4 B to 8 MiB
PROBE_S, PROBE_TIMES = 0.5, (3, 12)  # for each size: the time to aim at, and the least and most repeats

_OF_EPOCHS = ("checkpoint", "elastic", "early_stopping", "average_weights")  # what profiled steps are without


@dataclass(frozen=True)
class ProfilePart:
    """The request to a rank: the output folder, the number of steps, and whether the framework's profiler runs too."""

    folder: Path
    steps: int
    own_profile: bool = False


@dataclass(frozen=True)
class Turn:
    """A number of consecutive steps of one kind."""

    kind: Kind
    number: int
    steps: int


def turns(steps: int, warmup: int, every: int = 1) -> list[Turn]:
    """The order of a run: warm-up; plain steps and those with trace events in alternation; detailed ones; timeline.

    If ranks synchronize only `every` so many steps (Local SGD), all turns except the detailed one consist of whole
    rounds, and there may be fewer but longer turns.
    """
    rounds = -(-steps // every)
    count = min(TURNS, rounds)
    lengths = [every * (rounds // count + (number < rounds % count)) for number in range(count)]
    # The warm-up has trace events too, as some frameworks compile the step again for them.
    order = [Turn("plain", -1, max(1, warmup)), Turn("marked", -1, 2)]
    for number, length in enumerate(lengths):
        pair = [Turn("plain", number, length), Turn("marked", number, length)]
        order += pair if number % 2 == 0 else pair[::-1]
    traced = every * -(-max(3, steps // 4) // every)
    return [*order, Turn("detailed", count, max(3, steps // 3)), Turn(TRACED, count + 1, traced)]


def profile(adapter: Adapter, script: RankScript, recipe: Recipe, part: ProfilePart, heartbeat: Heartbeat) -> None:
    """Run one rank of `hvdkit profile`. Raises the same errors as `train.train`."""
    setup = start(adapter, script, recipe)
    heartbeat.beat("building the model")
    setup.check_trainable()
    session = setup.session(recipe, setup.strategy(recipe))
    if recipe.average_weights:
        session.keep_average(recipe.average_weights)
    session.broadcast_state(setup.mesh.data)
    RankProfiler(setup, session, part, heartbeat.beat).take_part()
    heartbeat.beat("leaving Horovod")
    adapter.shutdown()


class RankProfiler:
    """Profiles `session` on one rank; collective. Raises the errors of `Loop`, Horovod and the framework."""

    def __init__(self, setup: Setup, session: Session, part: ProfilePart, report: Callable[[str, int], None]) -> None:
        self._setup, self._session, self._part, self._report = setup, session, part, report
        self._adapter, self._recipe, self._topology = setup.adapter, setup.recipe, setup.mesh.topology
        self._world = setup.mesh.world
        self._observer = setup.adapter.observer(session.trainable)
        state = session.model_state()
        self._parameters = {name: state[name] for name in session.shapes}
        self._clock_samples: list[list[tuple[int, int]]] = []
        self._own = False  # whether the framework's own profiler is running

    def take_part(self) -> None:
        """Run all turns, then single collectives. Rank 0 writes the results. Raises RunError if it cannot."""
        epoch = _epoch()
        self._sample_clocks()
        every = self._recipe.sync.every if self._recipe.sync else 1
        plan = turns(self._part.steps, self._recipe.warmup_steps, every)
        loop, taken = self._steps(plan), _Turns(plan, self._switch)
        loop.handlers = [taken]
        loop.train()
        taken.close()
        self._sample_clocks()
        self._report("collectives alone", loop.step)
        gradients = sum(value.nbytes for value in self._parameters.values())
        sizes = sorted({*PROBE_BYTES, gradients - gradients % 4})
        collectives = [self._probe(size) for size in sizes] if self._topology.size > 1 else []
        interface = network_interface.interface()
        mine = RankRecord(
            rank=self._topology.rank,
            host=HOST,
            boot=_boot(),
            epoch=(epoch, _epoch()),
            meetings=self._clock_samples,
            steps=taken.records,
            collectives=collectives,
            interface=interface,
            rated_mbit_per_s=network_interface.rate_mbit_per_s(interface) if interface else None,
            peak_rss_mib=peak_rss_mib(),
            device_peak_mib=self._observer.device()[1],
        )
        everyone = self._adapter.allgather_object(mine.model_dump(), self._world, name="profile.ranks")
        if self._topology.is_root:
            record = self._record([RankRecord.model_validate(row) for row in everyone])
            write_atomic(self._part.folder / RECORD, record.model_dump_json() + "\n")

    def _steps(self, plan: list[Turn]) -> Loop:
        """A loop over the plan's steps, without handlers."""
        setup, steps, recipe = self._setup, sum(turn.steps for turn in plan), self._recipe
        epoch = StepPlan(recipe, len(setup.dataset.train), setup.mesh.data.size).steps_per_epoch
        changes = {"steps": steps, "epochs": max(recipe.epochs, -(-steps // epoch))}
        recipe = recipe.model_copy(update=changes | dict.fromkeys(_OF_EPOCHS))
        return Loop(self._session, setup.task, recipe, setup.mesh, setup.dataset, self._report)

    def _switch(self, turn: Turn | None) -> list[Mark]:
        """Start the next turn, or none, while no rank is in a step. Returns late trace events of the last turn."""
        self._barrier()
        self._observer.watch(turn.kind if turn else "plain")
        late = trace_events.take()
        if turn and turn.kind == TRACED:
            self._observer.timeline(self._part.folder / TIMELINE)
        elif turn is None:
            self._observer.timeline(None)
        own = self._part.own_profile and turn is not None and turn.kind == "detailed"
        if own != self._own:
            path = self._part.folder / OWN / f"rank-{self._topology.rank}.json"
            self._observer.own_profile(path if own else None)
            self._own = own
        trace_events.record(turn is not None and turn.kind != "plain")
        self._barrier()
        return late

    def _barrier(self, name: str = "profile.barrier") -> None:
        if self._topology.size > 1:
            self._largest(0.0, name)

    def _largest(self, value: float, name: str) -> float:
        mine = self._adapter.from_numpy(np.array([value], np.float64))
        return float(self._adapter.to_numpy(self._adapter.allreduce([mine], self._world, op="max", name=name)[0])[0])

    def _sample_clocks(self) -> None:
        """Record begin and end of small collectives: none ends on any rank before the last rank has begun it."""
        meetings = []
        for _ in range(CLOCK_SAMPLES if self._topology.size > 1 else 0):
            begin = perf_counter_ns()
            self._barrier("profile.meeting")
            meetings.append((begin, perf_counter_ns()))
        self._clock_samples.append(meetings)

    def _probe(self, size: int) -> Samples:
        """Time an allreduce of `size` bytes repeatedly, equally often on all ranks."""
        values = self._adapter.from_numpy(np.ones(size // 4, np.float32))

        def timed() -> tuple[int, int]:
            self._barrier()
            begin = perf_counter_ns()
            self._adapter.allreduce([values], self._world, op="sum", name=f"profile.probe.{size}")
            self._adapter.synchronize()
            return begin, perf_counter_ns()

        begin, end = timed()  # the first one negotiates and allocates
        slowest = self._largest(end - begin, "profile.slowest")
        times = int(np.clip(1e9 * PROBE_S / max(1.0, slowest), *PROBE_TIMES))
        return Samples(operation="allreduce", bytes=size, times=[timed() for _ in range(times)])

    def _record(self, ranks: list[RankRecord]) -> RunRecord:
        dataset = self._setup.dataset
        threads = None if self._recipe.threads == "auto" else self._recipe.threads
        return RunRecord(
            framework=self._adapter.NAME,
            versions=self._adapter.versions(),
            device=self._topology.device,
            threads=threads_per_rank(threads, self._topology.local_size),
            launcher=os.environ.get("HVDKIT_LAUNCHER") or "none",
            processor=self._observer.device()[0],
            hosts=self._topology.cross_size,
            shared_memory_ranks=self._topology.shared_memory_ranks,
            tuning=tuning.in_force(self._recipe),
            tells_layers="layer-times" in self._adapter.CAPABILITIES,
            parameter_bytes=sum(value.nbytes for value in self._parameters.values()),
            optimizer_bytes=self._session.state_bytes()["optimizer"],
            bytes_per_step=self._session.strategy.bytes_per_step or 0.0,
            unit=self._setup.task.unit,
            units_per_sample=self._setup.task.units,
            train_samples=None if dataset.native else len(dataset.train),
            tensors=[
                TensorRecord(name=name, shape=list(value.shape), dtype=str(value.dtype))
                for name, value in self._parameters.items()
            ],
            ranks=ranks,
        )


class _Turns(Handler):
    """Divides a run into turns, and records the trace events of each step."""

    def __init__(self, plan: list[Turn], switch: Callable[[Turn | None], list[Mark]]) -> None:
        self._left, self._switch = list(plan), switch
        self.records: list[StepRecord] = []
        self._turn: Turn | None = None
        self._done = 0  # steps of the turn

    def on_epoch_begin(self, run: Loop) -> None:
        self._open()

    def on_step_end(self, run: Loop) -> None:
        assert self._turn is not None
        ns = round(1e9 * run.clock.seconds[-1])
        marks = trace_events.take()
        self.records.append(StepRecord(kind=self._turn.kind, turn=self._turn.number, ns=ns, marks=marks))
        self._done += 1
        self._open()
        run.clock.resume()

    def close(self) -> None:
        """End the last turn."""
        self._begin(None)

    def _open(self) -> None:
        """Begin a step, and before it the next turn if the last one is complete."""
        if self._turn is None or self._done == self._turn.steps:
            if not self._left:
                return
            self._turn, self._done = self._left.pop(0), 0
            self._begin(self._turn)
        trace_events.take()

    def _begin(self, turn: Turn | None) -> None:
        """Begin a turn. Trace events that came late go to the steps in which they occurred."""
        late = self._switch(turn)
        for record in self.records if late else []:
            first, last = (record.marks[0][1], record.marks[-1][1]) if record.marks else (0, -1)
            more = [mark for mark in late if first <= mark[1] <= last]
            record.marks = sorted([*record.marks, *more], key=lambda mark: mark[1])


def _boot() -> str:
    """An identifier shared by all processes that read the same monotonic clock; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


def _epoch() -> int:
    """The wall clock minus the monotonic clock in nanoseconds: the median of a few readings."""
    readings = []
    for _ in range(9):
        before = perf_counter_ns()
        wall = time.time_ns()
        readings.append(wall - (before + perf_counter_ns()) // 2)
    return sorted(readings)[len(readings) // 2]
