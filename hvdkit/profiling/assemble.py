"""Builds a profile from the records of the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import hvdkit
from hvdkit.core.group import coordinates
from hvdkit.errors import RunError
from hvdkit.profiling import breakdown, communication_time, layers, timeline
from hvdkit.profiling.breakdown import COMMUNICATION, NEGOTIATION, OVERLAPPED, REDUCTION, TracedStep
from hvdkit.recipe.schema import Recipe
from hvdkit.results import json_files
from hvdkit.results.profile import Bound, Cost, Memory, Profile, ProfiledRank, Slowest, StepSplit, Tuning
from hvdkit.results.recording import TRACED, Kind, RankRecord, RunRecord
from hvdkit.worker.profile import RECORD, TIMELINE
from hvdkit.worker.tuning import CACHE, CYCLE, FUSION

Interval = tuple[int, int]  # begin and end of a collective on one rank


@dataclass(frozen=True)
class Findings:
    """A run's records in rank 0's time: `marked[i][r]` is step i with trace events on rank r.

    `traced` are steps with Horovod's timeline, `detailed` those with a trace event for each gradient and layer.
    """

    record: RunRecord
    clocks: list[Clock]
    marked: list[list[TracedStep]]
    traced: list[list[TracedStep]]
    detailed: list[list[TracedStep]]
    compresses: bool
    data_groups: list[list[int]]  # of each rank, those with which it averages gradients

    def beside(self, row: Sequence[TracedStep], rank: int) -> list[TracedStep]:
        """A step of the ranks with which a rank averages gradients, itself among them."""
        return [row[other] for other in self.data_groups[rank]]

    def of(self, rows: Sequence[Sequence[TracedStep]], share: float | None = None) -> list[list[Counter[str]]]:
        """The breakdown of each rank's steps."""
        return [
            [breakdown.durations(step, self.beside(row, rank), share) for rank, step in enumerate(row)] for row in rows
        ]

    @property
    def negotiation(self) -> float:
        """The fraction of negotiation in negotiation and communication together, from Horovod's timeline."""
        rows = self.of([row for row in self.traced if row[0].operations])
        times = sum((times_of_rank for row in rows for times_of_rank in row), Counter[str]())
        return times[NEGOTIATION] / max(1, times[NEGOTIATION] + times[COMMUNICATION])

    @property
    def durations(self) -> list[list[Counter[str]]]:
        """The breakdown of the steps with trace events."""
        return self.of(self.marked, self.negotiation)


def read(folder: Path, recipe: Recipe) -> Findings:
    """The records of a profiled run. Raises RequestError, one line, if a file is missing or damaged."""
    record = json_files.read(RunRecord, folder / RECORD, "the record of a profiled run")
    return gather(record, _operations(folder, record), recipe)


def gather(record: RunRecord, operations: Sequence[timeline.Operation], recipe: Recipe) -> Findings:
    """The findings from a record and a timeline that have been read."""
    # Horovod takes gradients as they are; everything else needs work before and after.
    compresses = recipe.compression.method != "none" or recipe.sync is not None or recipe.allreduce != "ring"
    own = [_clock_of(rank, record.ranks[0]) for rank in record.ranks]

    def of(kind: Kind) -> list[list[TracedStep]]:
        columns = [
            [breakdown.read(step, clock, compresses) for step in rank.steps if step.kind == kind and step.turn >= 0]
            for rank, clock in zip(record.ranks, own, strict=True)
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    traced = []
    for row in of(TRACED):
        mine = communication_time.within(operations, row[0])
        traced.append([replace(step, operations=mine) for step in row])
    axes, count = recipe.parallel, len(record.ranks)
    places = [coordinates(rank, count, axes.pipeline, axes.tensor)[1:] for rank in range(count)]
    groups = [[other for other in range(count) if places[other] == place] for place in places]
    return Findings(record, own, of("marked"), traced, of("detailed"), compresses, groups)


def profile(findings: Findings, recipe: Recipe) -> Profile:
    """The profile. Raises RunError if a step has no trace events."""
    record, rows = findings.record, findings.durations
    if not rows or not all(step.phases for row in findings.marked for step in row):
        raise RunError("profile: no step recorded trace events; is the recipe's script one of hvdkit's?")
    count = len(record.ranks)
    traced = [[times[OVERLAPPED] for times in row] for row in findings.of(findings.traced)]
    hidden = [float(np.mean([row[rank] for row in traced])) if traced else 0.0 for rank in range(count)]
    measured = breakdown.split(rows, findings.compresses, float(np.mean(hidden)))
    assert measured.forward_ms is not None and measured.backward_ms is not None
    details = [step for row in findings.detailed[1:] for step in row]  # the first one includes setting the hooks
    tensors = layers.tensors(record.tensors, details, measured.backward_ms.median)
    lanes, divides = record.hosts if record.shared_memory_ranks else 0, recipe.parallel.divides
    communications = communication_time.of_step([row[0] for row in findings.traced], count, lanes)
    if divides:  # collectives of several groups
        communications = [op.model_copy(update={"link_bytes": None}) for op in communications]
    latencies = communication_time.alone(record.ranks, findings.clocks)
    return Profile(
        schema_version=1,
        hvdkit_version=hvdkit.__version__,
        framework=record.framework,
        framework_version=record.versions["framework"],
        horovod_version=record.versions.get("horovod"),
        recipe=recipe.name,
        settings=recipe.model_dump(mode="json"),
        model=recipe.model.name,
        np=count,
        hosts=record.hosts,
        shared_memory_ranks=record.shared_memory_ranks,
        launcher=record.launcher,
        device=record.device,
        processor=record.processor,
        threads=record.threads,
        batch_size=recipe.batch_size,
        unit=record.unit,
        units_per_sample=record.units_per_sample,
        train_samples=record.train_samples,
        accumulate=recipe.accumulate,
        precision=recipe.precision,
        compression=recipe.compression.method,
        measured_steps=len(rows),
        tensors=tensors,
        layers=layers.layers(tensors, details, measured.forward_ms.median, record.tells_layers),
        step=measured,
        ranks=[
            ProfiledRank(
                rank=rank.rank,
                host=rank.host,
                clock_offset_ms=clock.offsets[0] / 1e6,
                clock_error_ms=clock.error / 1e6,
                split=breakdown.split([[row[rank.rank]] for row in rows], findings.compresses, hidden[rank.rank]),
            )
            for rank, clock in zip(record.ranks, findings.clocks, strict=True)
        ],
        slowest=None if divides else slowest(findings.marked, record.ranks),
        bound=bound(measured),
        communications=communications,
        bytes_per_step=round(record.bytes_per_step),
        latencies=latencies,
        link=communication_time.link(record.ranks, communications, latencies, lanes),
        tuning=Tuning(
            cycle_time_ms=record.tuning[CYCLE],
            fusion_threshold_bytes=int(record.tuning[FUSION]),
            cache_capacity=int(record.tuning[CACHE]),
        ),
        memory=Memory(
            parameter_bytes=record.parameter_bytes,
            optimizer_bytes=record.optimizer_bytes,
            peak_rss_mib=max(rank.peak_rss_mib for rank in record.ranks),
            device_peak_mib=max((rank.device_peak_mib for rank in record.ranks if rank.device_peak_mib), default=None),
        ),
        cost=cost(record),
    )


def slowest(steps: Sequence[Sequence[TracedStep]], ranks: Sequence[RankRecord]) -> Slowest | None:
    """The rank that is last to submit its gradients, on average; None for one rank, or if nothing was reduced."""
    submitted = [[at for step in row for at in step.starts(REDUCTION)[:1]] for row in steps]
    complete = [row for row in submitted if len(row) == len(ranks) > 1]
    if not complete:
        return None
    behind = np.array(complete, np.int64) - np.min(complete, axis=1, keepdims=True)
    last = int(behind.mean(axis=0).argmax())
    return Slowest(
        rank=last,
        host=ranks[last].host,
        behind_ms=float(behind[:, last].mean()) / 1e6,
        last_share=float((behind.argmax(axis=1) == last).mean()),
    )


def bound(split: StepSplit) -> Bound:
    """The largest part of a step."""
    spreads = split.parts()
    return max(spreads, key=lambda name: spreads[name].mean)


def cost(record: RunRecord) -> Cost | None:
    """Steps with trace events against plain ones, each on its slowest rank, by pairs of turns."""

    def medians(kind: Kind) -> dict[int, float]:
        times_of: dict[int, list[float]] = {}
        for row in zip(*(rank.steps for rank in record.ranks), strict=True):
            if row[0].kind == kind and row[0].turn >= 0:
                times_of.setdefault(row[0].turn, []).append(max(step.ns for step in row) / 1e6)
        return {turn: float(np.median(times)) for turn, times in times_of.items()}

    plain, marked = medians("plain"), medians("marked")
    both = sorted(plain.keys() & marked.keys())
    if not both:
        return None
    percents = [100 * (marked[turn] / plain[turn] - 1) for turn in both]
    return Cost(
        with_ms=float(np.median([marked[turn] for turn in both])),
        without_ms=float(np.median([plain[turn] for turn in both])),
        percent=float(np.median(percents)),
        turns=len(both),
        low_percent=min(percents),
        high_percent=max(percents),
    )


def _operations(folder: Path, record: RunRecord) -> list[timeline.Operation]:
    """The collectives in the timeline of rank 0's Horovod; none without Horovod."""
    path = folder / TIMELINE
    if "horovod" not in record.versions or not any(step.kind == TRACED for step in record.ranks[0].steps):
        return []
    if len(record.ranks) == 1 and path.is_file() and not path.stat().st_size:
        return []  # a single rank may request nothing from Horovod, which then writes nothing
    return timeline.read(path, sum(record.ranks[0].epoch) // 2)


@dataclass(frozen=True)
class Clock:
    """A rank's clock is ahead of rank 0's by `offsets[i]` at its own time `times[i]`, with at most `error` of error."""

    times: tuple[int, ...] = (0,)
    offsets: tuple[int, ...] = (0,)
    error: int = 0

    def __call__(self, at: int) -> int:
        """Rank 0's time when this rank's is `at`; between comparisons the offset is interpolated linearly."""
        return at - round(float(np.interp(at, self.times, self.offsets)))


def _clock_of(rank: RankRecord, root: RankRecord) -> Clock:
    """The clock of a rank. Ranks on rank 0's machine share its clock; others are compared by small collectives."""
    if rank.rank == root.rank or (rank.boot and rank.boot == root.boot):
        return Clock()
    samples = [
        (theirs[len(theirs) // 2][0], *_ahead(ours, theirs))
        for ours, theirs in zip(root.meetings, rank.meetings, strict=True)
        if theirs
    ]
    times, offsets, errors = zip(*samples, strict=True)
    return Clock(times, offsets, max(errors))


def _ahead(ours: Sequence[Interval], theirs: Sequence[Interval]) -> tuple[int, int]:
    """How far their clock is ahead of ours, and the error of that.

    No collective ends on any rank before it has begun on all ranks, so each bounds the offset from both sides.
    """
    low = max(their_begin - our_end for (_, our_end), (their_begin, _) in zip(ours, theirs, strict=True))
    high = min(their_end - our_begin for (our_begin, _), (_, their_end) in zip(ours, theirs, strict=True))
    return (low + high) // 2, max(0, (high - low + 1) // 2)
