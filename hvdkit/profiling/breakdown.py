"""Where the time of steps went, from marks by one clock and from Horovod's timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdkit.core import trace_events
from hvdkit.profiling.timeline import Operation
from hvdkit.results.profile import Split, Spread
from hvdkit.results.recording import StepRecord

Interval = tuple[int, int]  # nanoseconds
INPUT, FORWARD, BACKWARD, COMPRESSION, UPDATE = "input", "forward", "backward", "compression", "update"
REDUCTION, GAPS = "reduction", "gaps"
WAITING, NEGOTIATION, COMMUNICATION = "waiting", "negotiation", "communication"  # what a reduction is made of
COMPUTE = (FORWARD, BACKWARD, COMPRESSION, UPDATE)
# What has been going on when a mark is reached.
_UNTIL = {
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
}


@dataclass(frozen=True)
class Phase:
    """A stretch of a step, by rank 0's clock."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Step:
    """One rank's marked step; `ns` is what the loop's own clock says. `operations` are empty where none was watched."""

    ns: int
    phases: list[Phase]
    details: list[tuple[str, int]] = field(default_factory=list)  # READY, LAYER and PUT marks
    operations: list[Operation] = field(default_factory=list)

    @property
    def open(self) -> int:
        """When it began."""
        return self.phases[0].start

    @property
    def end(self) -> int:
        """When it had ended."""
        return self.phases[-1].end

    @property
    def asked(self) -> int | None:
        """When the rank first handed gradients to Horovod and waited; None where it did not in this step."""
        return next((phase.start for phase in self.phases if phase.kind == REDUCTION), None)


def read(record: StepRecord, clock: Callable[[int], int], compresses: bool) -> Step:
    """A rank's marks as phases by rank 0's clock."""
    found = [(name, clock(at)) for name, at in record.marks]
    details = [each for each in found if each[0].startswith((trace_events.READY, trace_events.LAYER, trace_events.PUT))]
    phases: list[Phase] = []
    before = None
    for name, at in found:
        if name in _UNTIL and before is not None:
            kind = _UNTIL[name]
            phases.append(Phase(GAPS if kind == COMPRESSION and not compresses else kind, before, at))
        if name in _UNTIL or name == trace_events.OPEN:
            before = at
    return Step(record.ns, phases, details)


@dataclass(frozen=True)
class Parts:
    """What one rank's step came to, in nanoseconds; see `profile.Split`."""

    step: int
    input: int
    forward: int
    backward: int
    compression: int
    update: int
    exposed: int
    negotiation: int
    waiting: int
    gaps: int
    overlapped: int


def stretches(step: Step, all_ranks: Sequence[Step], share: float | None = None) -> list[Phase]:
    """One rank's step in which each reduction is split, given all ranks' same step.

    A rank waits first for the last rank to hand in its gradients; then for Horovod to begin, which the timeline tells,
    or where this step has none, `share` of the time that is left, as in steps that had one; the rest is communication.
    """
    moving = union((each.start, each.end) for each in step.operations)
    last = iter(_last_asked(all_ranks))
    found: list[Phase] = []
    for phase in step.phases:
        if phase.kind != REDUCTION:
            found.append(phase)
            continue
        met = min(max(phase.start, next(last, phase.start)), phase.end)
        found.append(Phase(WAITING, phase.start, met))
        if share is not None:
            begun = met + round(share * (phase.end - met))
            found += [Phase(NEGOTIATION, met, begun), Phase(COMMUNICATION, begun, phase.end)]
            continue
        at = met
        for start, end in clipped(moving, (met, phase.end)):
            found += [Phase(NEGOTIATION, at, start), Phase(COMMUNICATION, start, end)]
            at = end
        found.append(Phase(COMMUNICATION, at, phase.end))  # the result's way back to the framework
    return found


def parts(step: Step, all_ranks: Sequence[Step], share: float | None = None) -> Parts:
    """The same, summed up."""
    found = stretches(step, all_ranks, share)

    def total(kind: str) -> int:
        return sum(phase.end - phase.start for phase in found if phase.kind == kind)

    moving = union((each.start, each.end) for each in step.operations)
    computing = [(phase.start, phase.end) for phase in step.phases if phase.kind in (FORWARD, BACKWARD, COMPRESSION)]
    return Parts(
        step=step.ns,
        input=total(INPUT),
        forward=total(FORWARD),
        backward=total(BACKWARD),
        compression=total(COMPRESSION),
        update=total(UPDATE),
        exposed=total(COMMUNICATION),
        negotiation=total(NEGOTIATION),
        waiting=total(WAITING),
        gaps=total(GAPS),
        overlapped=sum(length(clipped(moving, each)) for each in computing),
    )


def _reductions(step: Step) -> list[Phase]:
    return [phase for phase in step.phases if phase.kind == REDUCTION]


def _last_asked(ranks: Sequence[Step]) -> list[int]:
    """For each reduction of a step, when the last rank asked for it; as far as all ranks have as many."""
    return [max(each) for each in zip(*([phase.start for phase in _reductions(one)] for one in ranks), strict=False)]


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
    """What of the intervals lies within the window."""
    cut = [(max(start, window[0]), min(end, window[1])) for start, end in intervals]
    return [(start, end) for start, end in cut if start < end]


def length(intervals: Iterable[Interval]) -> int:
    """Their lengths together."""
    return sum(end - start for start, end in intervals)


def spread(values: Sequence[float]) -> Spread:
    """Of nanoseconds, in milliseconds."""
    found = np.asarray(values, np.float64) / 1e6
    low, median, high = (float(each) for each in np.percentile(found, (10, 50, 90)))
    return Spread(mean=float(found.mean()), median=median, low=min(low, median), high=max(high, median))


def split(rows: Sequence[Sequence[Parts]], compresses: bool, overlapped: float) -> Split:
    """The mean over ranks, spread over steps; `rows` are by step, then rank.

    `overlapped` is the mean of communication beneath compute, in nanoseconds, where it was watched in other steps.
    """

    def of(*names: str) -> Spread:
        return spread([float(np.mean([sum(getattr(one, name) for name in names) for one in row])) for row in rows])

    hidden = of("overlapped")
    if not hidden.mean:
        hidden = spread([overlapped])
    return Split(
        step_ms=of("step"),
        input_ms=of("input"),
        compute_ms=of(*COMPUTE),
        forward_ms=of("forward"),
        backward_ms=of("backward"),
        compression_ms=of("compression") if compresses else None,
        update_ms=of("update"),
        exposed_communication_ms=of("exposed"),
        negotiation_ms=of("negotiation"),
        waiting_ms=of("waiting"),
        gaps_ms=of("gaps"),
        overlapped_communication_ms=hidden,
    )
