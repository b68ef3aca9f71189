"""What the ranks of a profiled run write down; `hvdkit.profiling` makes a profile of it. Times are nanoseconds.

Each rank's times are by its own monotonic clock; `clock` and `boot` are what another rank's can be compared by.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

# Of a step: without marks; with them; with one for each gradient and layer too; with Horovod's timeline beside them.
Kind = Literal["plain", "marked", "detailed", "traced"]
TRACED: Kind = "traced"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StepRecord(_Record):
    """One step: by the loop's own clock it took `ns`. A plain one has no marks."""

    kind: Kind
    turn: int
    ns: int
    marks: list[tuple[str, int]] = []


class Samples(_Record):
    """A collective of `bytes` a rank by itself: begin and end of each."""

    operation: str
    bytes: int
    times: list[tuple[int, int]]


class RankRecord(_Record):
    """One rank's part.

    `boot` is the same where the clock is the same. `meetings` are begin and end of small collectives, at the start and
    the end of the run. `epoch` is how far the wall clock is ahead of the monotonic one, at the start and the end.
    """

    rank: int
    host: str
    boot: str
    epoch: tuple[int, int]
    meetings: list[list[tuple[int, int]]]
    steps: list[StepRecord]
    collectives: list[Samples]
    interface: str | None
    rated_mbit_per_s: float | None
    peak_rss_mib: float
    device_peak_mib: float | None


class TensorRecord(_Record):
    """A parameter that learns, by its name in a state."""

    name: str
    shape: list[int]
    dtype: str


class RunRecord(_Record):
    """All of it, as rank 0 writes it."""

    framework: str
    versions: dict[str, str]
    device: str
    threads: int
    launcher: str
    processor: str
    hosts: int
    tuning: dict[str, float]
    tells_layers: bool
    parameter_bytes: int
    optimizer_bytes: int
    bytes_per_step: float
    tensors: list[TensorRecord]
    ranks: list[RankRecord]
