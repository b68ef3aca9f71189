"""What the ranks of a profiled run record; `hvdkit.profiling` makes a profile of it. Times are nanoseconds.

Each rank's times are read from its own monotonic clock. `boot` and `meetings` relate the clocks of the ranks.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvdkit.results.json_files import Record

# A step without trace events; with them; with one for each gradient and layer too; with Horovod's timeline as well.
Kind = Literal["plain", "marked", "detailed", "traced"]
TRACED: Kind = "traced"


class StepRecord(Record):
    """One step, which took `ns` by the training loop's own clock. A plain one has no trace events."""

    kind: Kind
    turn: int
    ns: int
    marks: list[tuple[str, int]] = Field(default_factory=list)


class Samples(Record):
    """A collective of `bytes` a rank, run by itself: begin and end of each repeat."""

    operation: str
    bytes: int
    times: list[tuple[int, int]]


class RankRecord(Record):
    """One rank's part of the record.

    Ranks with the same `boot` share a clock. `meetings` are begin and end of small collectives, at the start and at the
    end of the run. `epoch` is the wall clock minus the monotonic clock, at the start and at the end.
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


class TensorRecord(Record):
    """A trainable parameter, under its name in the state."""

    name: str
    shape: list[int]
    dtype: str


class RunRecord(Record):
    """The whole record, as rank 0 writes it. `unit` to `train_samples` are as in a profile."""

    framework: str
    versions: dict[str, str]
    device: str
    threads: int
    launcher: str
    processor: str
    hosts: int
    shared_memory_ranks: int = 0
    tuning: dict[str, float]
    tells_layers: bool
    parameter_bytes: int
    optimizer_bytes: int
    bytes_per_step: float
    unit: str = "images"
    units_per_sample: int = 1
    train_samples: int | None = None
    tensors: list[TensorRecord]
    ranks: list[RankRecord]
