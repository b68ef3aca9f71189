"""A step of a pipeline by its trace events, and the same step as its schedule predicts it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from hvdkit import tasks
from hvdkit.core import cuts, trace_events
from hvdkit.core.group import coordinates
from hvdkit.core.schedules import Action, bubble
from hvdkit.profiling import breakdown
from hvdkit.profiling.assemble import Findings
from hvdkit.profiling.breakdown import TracedStep
from hvdkit.recipe.schema import Recipe
from hvdkit.results.pipeline import Doing, PipelineRank, PipelineStep, Span
from hvdkit.worker import stages

_DOING: dict[str, Doing] = {
    breakdown.INPUT: "input", breakdown.FORWARD: "forward", breakdown.BACKWARD: "backward", breakdown.UPDATE: "update",
    breakdown.COMPRESSION: "average", breakdown.REDUCTION: "average", breakdown.COMMUNICATION: "average",
    breakdown.NEGOTIATION: "average", breakdown.WAITING: "average", breakdown.GAPS: "other",
}  # fmt: skip
Lengths = Mapping[str, float]  # of a stage's passes, in ms, by kind


def measured(findings: Findings, recipe: Recipe) -> PipelineStep:
    """The step of median length, the bubble of all, and what the schedule predicts."""
    axes, rows, count = recipe.parallel, findings.marked, len(findings.record.ranks)
    passes = [[spans(step) for step in row] for row in rows]
    places = [coordinates(rank, count, axes.pipeline, axes.tensor) for rank in range(count)]
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in passes:
        for (_, stage, _), of_rank in zip(places, row, strict=True):
            for span in of_rank:
                times[stage, span.doing].append(span.end_ms - span.start_ms)
    of_stages = [
        {kind: float(np.mean(times[stage, kind])) for kind in ("forward", "backward")} for stage in range(axes.pipeline)
    ]
    microbatches, table = cuts.passes_of(recipe), tasks.choose(recipe).architecture()
    predicted = timed(axes.schedule, microbatches, axes.chunks, of_stages)
    length = max(span.end_ms for of_stage in predicted for span in of_stage)
    lengths = [max(step.ns for step in row) / 1e6 for row in rows]
    shown = sorted(range(len(rows)), key=lambda number: lengths[number])[len(rows) // 2]
    zero = min(step.open for step in rows[shown])
    hosts = [rank.host for rank in findings.record.ranks]
    return PipelineStep(
        framework=findings.record.framework,
        model=recipe.model.name,
        np=count,
        schedule=axes.schedule,
        tensor=axes.tensor,
        chunks=axes.chunks,
        microbatches=microbatches,
        of_stages=stages.planned(table, cuts.resolved(recipe, table), hosts, microbatches),
        measured_steps=len(rows),
        step_ms=float(np.mean(lengths)),
        predicted_ms=length,
        bubble=float(
            np.mean(
                [
                    _idle(of, step.ns / 1e6)
                    for row, steps in zip(passes, rows, strict=True)
                    for of, step in zip(row, steps, strict=True)
                ]
            )
        ),
        predicted_bubble=float(np.mean([_idle(of_stage, length) for of_stage in predicted])),
        equal_bubble=bubble(axes.pipeline, microbatches, axes.chunks),
        forward_ms=[of["forward"] for of in of_stages],
        backward_ms=[of["backward"] for of in of_stages],
        shares_memory=bool(findings.record.shared_memory_ranks),
        ranks=[
            PipelineRank(
                rank=rank,
                stage=stage,
                measured=[span.moved((step.open - zero) / 1e6) for span in [*passes[shown][rank], *_others(step)]],
                predicted=predicted[stage],
            )
            for rank, ((_, stage, _), step) in enumerate(zip(places, rows[shown], strict=True))
        ],
    )


def spans(step: TracedStep) -> list[Span]:
    """The actions of a step in their order, in ms from its begin."""
    listed: list[Span] = []
    before = next(phase.end for phase in step.phases if phase.kind == breakdown.INPUT)  # the batch is loaded
    for name, at in step.details:
        if name.startswith(trace_events.ACTION):
            kind, number, chunk = name.removeprefix(trace_events.ACTION).split(":")
            way = kind.partition(" ")[0]
            doing: Doing = "wait" if way == "receive" else "send" if way == "send" else kind  # type: ignore[assignment]
            start, end = ((moment - step.open) / 1e6 for moment in (before, at))
            listed.append(Span(doing=doing, start_ms=start, end_ms=end, microbatch=int(number), chunk=int(chunk)))
            before = at
    return listed


def _others(step: TracedStep) -> list[Span]:
    """What a rank does before the first action and after the last one."""
    acted = [at for name, at in step.details if name.startswith(trace_events.ACTION)]
    begin = next(phase.end for phase in step.phases if phase.kind == breakdown.INPUT)
    return [
        Span(doing=_DOING[phase.kind], start_ms=(phase.start - step.open) / 1e6, end_ms=(phase.end - step.open) / 1e6)
        for phase in step.phases
        if phase.end > phase.start and (phase.end <= begin or phase.start >= acted[-1])
    ]


def _idle(of_rank: Sequence[Span], length: float) -> float:
    """The share of a step in which a rank does neither forward nor backward passes."""
    return 1 - sum(span.end_ms - span.start_ms for span in of_rank if span.doing in ("forward", "backward")) / length


def timed(schedule: str, microbatches: int, chunks: int, lengths: Sequence[Lengths]) -> list[list[Span]]:
    """When each stage does its passes, if messages take no time."""
    passes: list[list[Span]] = [[] for _ in lengths]

    def note(stage: int, action: Action, begin: float, end: float) -> None:
        doing: Doing = "forward" if action.kind == "forward" else "backward"
        span = Span(doing=doing, start_ms=begin, end_ms=end, microbatch=action.microbatch, chunk=action.chunk)
        passes[stage].append(span)

    forward, backward = ([[of_stage[kind]] * chunks for of_stage in lengths] for kind in ("forward", "backward"))
    cuts.simulated(schedule, microbatches, forward, backward, on_pass=note)
    return passes
