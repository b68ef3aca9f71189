"""Where the time of a step goes, from the ranks' trace events and from Horovod's timeline. Times are nanoseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdkit.core import trace_events
from hvdkit.profiling.timeline import Operation
from hvdkit.results.profile import Spread, StepSplit
from hvdkit.results.recording import StepRecord

Interval = tuple[int, int]
INPUT, FORWARD, BACKWARD, COMPRESSION, UPDATE = "input", "forward", "backward", "compression", "update"
REDUCTION, GAPS = "reduction", "gaps"
WAITING, NEGOTIATION, COMMUNICATION = "waiting", "negotiation", "communication"  # the parts of a reduction
STEP, OVERLAPPED = "step", "overlapped"
# The kind of the phase that ends with a trace event.
_ENDS = {
    trace_events.STEP: INPUT,
    trace_events.BEGIN: GAPS,
    trace_events.INPUTS: INPUT,
    trace_events.FORWARD: FORWARD,
    trace_events.BACKWARD: BACKWARD,
    trace_events.SENT: COMPRESSION,
    trace_events.RECEIVED: REDUCTION,
    trace_events.REDUCED: COMPRESSION,
    trace_events.UPDATED: UPDATE,
    trace_events.END: GAPS,
    trace_events.DELIVERED: COMMUNICATION,
}
# The same of an action of a pipeline; a send only starts one.
_ACTIONS = {"forward": FORWARD, "backward": BACKWARD, "receive": WAITING, "send": COMMUNICATION}


@dataclass(frozen=True)
class Phase:
    """A part of a step, by rank 0's clock."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class TracedStep:
    """A step of one rank. `ns` is its duration by the training loop's own clock.

    `details` are the READY, LAYER, PUT and ACTION events. `operations` are those of Horovod's timeline, empty without
    one.
    """

    ns: int
    phases: list[Phase]
    details: list[tuple[str, int]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    @property
    def open(self) -> int:
        """When the step begins."""
        return self.phases[0].start

    @property
    def end(self) -> int:
        """When the step ends."""
        return self.phases[-1].end

    def starts(self, kind: str) -> list[int]:
        """When each phase of a kind begins."""
        return [phase.start for phase in self.phases if phase.kind == kind]

    def last(self, kind: str) -> Phase:
        """The last phase of a kind. If an update accumulates several batches, that of the batch that is reduced."""
        return [phase for phase in self.phases if phase.kind == kind][-1]


def read(record: StepRecord, clock: Callable[[int], int], compresses: bool) -> TracedStep:
    """A rank's step, with its times put on rank 0's clock."""
    events = [(name, clock(at)) for name, at in record.marks]
    prefixes = (trace_events.READY, trace_events.LAYER, trace_events.PUT, trace_events.ACTION)
    details = [(name, at) for name, at in events if name.startswith(prefixes)]
    phases: list[Phase] = []
    before = None
    if any(name.startswith(trace_events.ACTION) for name, _ in events):  # which say when backward has ended
        events = [event for event in events if event[0] != trace_events.BACKWARD]
    for name, at in events:
        if (kind := _ends(name)) and before is not None:
            kind = GAPS if kind == COMPRESSION and not compresses else kind
            if phases and phases[-1].kind == kind and name.startswith(trace_events.ACTION):
                before = phases.pop().start  # a pass, and what belongs to it
            phases.append(Phase(kind, before, at))
        if kind or name == trace_events.OPEN:
            before = at
    return TracedStep(record.ns, phases, details)


def _ends(name: str) -> str | None:
    """The kind of the phase that ends with a trace event, if one does."""
    if name.startswith(trace_events.ACTION):
        return _ACTIONS[name.removeprefix(trace_events.ACTION).split(" ")[0].split(":")[0]]
    return _ENDS.get(name)


def phases(step: TracedStep, all_ranks: Sequence[TracedStep], share: float | None = None) -> list[Phase]:
    """The phases of one rank's step with each reduction split into its parts; `all_ranks` of it have the same step.

    A rank first waits for the last rank to submit its gradients, then for Horovod to negotiate; the rest is
    communication. The timeline says when negotiation ends; without one, it takes the fraction `share` of the remaining
    time, as in steps that have one.
    """
    moving = union((operation.start, operation.end) for operation in step.operations)
    # for each reduction, when the last rank submitted its gradients, as far as all ranks have as many reductions
    submitted = map(max, zip(*(step.starts(REDUCTION) for step in all_ranks), strict=False))
    split: list[Phase] = []
    for phase in step.phases:
        if phase.kind != REDUCTION:
            split.append(phase)
            continue
        at = min(max(phase.start, next(submitted, phase.start)), phase.end)
        split.append(Phase(WAITING, phase.start, at))
        if share is not None:
            begin = at + round(share * (phase.end - at))
            split += [Phase(NEGOTIATION, at, begin), Phase(COMMUNICATION, begin, phase.end)]
            continue
        for start, end in clipped(moving, (at, phase.end)):
            split += [Phase(NEGOTIATION, at, start), Phase(COMMUNICATION, start, end)]
            at = end
        split.append(Phase(COMMUNICATION, at, phase.end))  # the result's way back to the framework
    return split


def durations(step: TracedStep, all_ranks: Sequence[TracedStep], share: float | None = None) -> Counter[str]:
    """The time of each kind of phase, of the step, and of communication that overlaps with compute."""
    times = Counter({STEP: step.ns})
    for phase in phases(step, all_ranks, share):
        times[phase.kind] += phase.end - phase.start
    moving = union((operation.start, operation.end) for operation in step.operations)
    for phase in step.phases:
        if phase.kind in (FORWARD, BACKWARD, COMPRESSION):
            times[OVERLAPPED] += sum(end - start for start, end in clipped(moving, (phase.start, phase.end)))
    return times


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches of time without overlap, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of the intervals that lie within the window."""
    cut = [(max(start, window[0]), min(end, window[1])) for start, end in intervals]
    return [(start, end) for start, end in cut if start < end]


def spread(values: Sequence[float]) -> Spread:
    """The spread of nanoseconds, in milliseconds."""
    times = np.asarray(values, np.float64) / 1e6
    low, median, high = (float(value) for value in np.percentile(times, (10, 50, 90)))
    return Spread(mean=float(times.mean()), median=median, low=min(low, median), high=max(high, median))


def split(rows: Sequence[Sequence[Counter[str]]], compresses: bool, overlapped: float) -> StepSplit:
    """The mean over ranks, and its spread over steps; `rows` has the `durations` by step, then by rank.

    `overlapped` is the mean of overlapped communication in the steps with a timeline, used if these have none.
    """

    def of(*kinds: str) -> Spread:
        return spread([float(np.mean([sum(times[kind] for kind in kinds) for times in row])) for row in rows])

    hidden = of(OVERLAPPED)
    return StepSplit(
        step_ms=of(STEP),
        input_ms=of(INPUT),
        compute_ms=of(FORWARD, BACKWARD, COMPRESSION, UPDATE),
        forward_ms=of(FORWARD),
        backward_ms=of(BACKWARD),
        compression_ms=of(COMPRESSION) if compresses else None,
        update_ms=of(UPDATE),
        exposed_communication_ms=of(COMMUNICATION),
        negotiation_ms=of(NEGOTIATION),
        waiting_ms=of(WAITING),
        gaps_ms=of(GAPS),
        overlapped_communication_ms=hidden if hidden.mean else spread([overlapped]),
    )
