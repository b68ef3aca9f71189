"""The schema of `pipeline.json`: a measured step of a pipeline, beside what its schedule predicts.

Times are milliseconds from the step's begin. Predictions take the mean measured passes of each stage, and messages that
take no time.
"""

from __future__ import annotations

from typing import Any, Literal

from hvdkit.results.json_files import Count, Figures, Result
from hvdkit.results.train import PlannedStage

Doing = Literal["forward", "backward", "send", "wait", "average", "update", "input", "other"]


class Span(Figures):
    """What a rank does from `start_ms` to `end_ms`; `microbatch` and `chunk` of its stage count from 0."""

    doing: Doing
    start_ms: float
    end_ms: float
    microbatch: int | None = None
    chunk: int = 0

    def moved(self, ms: float) -> Span:
        """The same, so much later."""
        return self.model_copy(update={"start_ms": self.start_ms + ms, "end_ms": self.end_ms + ms})


class PipelineRank(Figures):
    """A rank of a stage, what it has done in the step, and its passes as the schedule predicts them."""

    rank: int
    stage: int
    measured: list[Span]
    predicted: list[Span]


class PipelineStep(Figures, Result, file="pipeline.json", of="the pipeline.json of `hvdkit profile`"):
    """`pipeline.json`. `ranks` show the step of median length of `measured_steps`, over which all else is a mean.

    `bubble` is the share of a step (0 to 1) in which a rank computes neither forward nor backward, the mean over the
    ranks. `predicted_bubble` is that of the schedule with the measured passes, `equal_bubble` with passes of equal
    length: (p - 1) / (m v + p - 1). `step_ms` are the measured steps by the slowest rank, `predicted_ms` is the length
    of the schedule, without input, averaging and update. `forward_ms` and `backward_ms` are of a pass, by stage.
    `shares_memory` is whether ranks of a host exchange tensors through memory.
    """

    schema_version: Literal[1] = 1
    framework: str
    model: str
    np: Count
    schedule: str
    chunks: Count
    microbatches: Count
    of_stages: list[PlannedStage]
    tensor: Count
    shares_memory: bool
    measured_steps: Count
    step_ms: float
    predicted_ms: float
    bubble: float
    predicted_bubble: float
    equal_bubble: float
    forward_ms: list[float]
    backward_ms: list[float]
    ranks: list[PipelineRank]

    def records(self) -> list[dict[str, Any]]:
        """A row for each measured span of each rank."""
        return [{"rank": rank.rank} | span.model_dump() for rank in self.ranks for span in rank.measured]
