"""The schema of `profile.json`: where the time of a run's steps goes; the input of the simulator.

Times are milliseconds, sizes bytes, rates 10^6 bits per second.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from hvdkit.files import write_atomic
from hvdkit.results import json_files
from hvdkit.results.json_files import Record, Result

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

Time = Annotated[float, Field(ge=0)]
Size = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Bound = Literal["compute", "communication", "negotiation", "waiting", "input", "gaps"]


class _Strict(Record):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Spread(_Strict):
    """A time over the measured steps. Means add up; `low` and `high` are the 10th and 90th percentile."""

    mean: Time
    median: Time
    low: Time
    high: Time

    @model_validator(mode="after")
    def _check_order(self) -> Spread:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"expected low <= median <= high, got {self.low}, {self.median}, {self.high}")
        return self


class Tensor(_Strict):
    """A gradient. `ready_ms` is when backward finishes it, from backward's start (median).

    `bytes` is its size in memory, in `dtype`, before compression. `layer` is the name of one of the layers.
    """

    name: str
    shape: list[Size]
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    bytes: Size
    ready_ms: Time
    layer: str

    @model_validator(mode="after")
    def _check_size(self) -> Tensor:
        expected = prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.bytes != expected:
            raise ValueError(f"bytes: expected {expected} for {self.shape} in {self.dtype}, got {self.bytes}")
        return self


class Layer(_Strict):
    """One layer with its median times, None if the framework has none. `kind` is conv, norm, dense or other."""

    name: str
    kind: str
    forward_ms: Time | None
    backward_ms: Time | None


class Split(_Strict):
    """Where the time of a step goes.

    The means add up: input + compute + exposed_communication + negotiation + waiting + gaps = step. Compute is forward
    + backward + compression + update, which are None if the framework does not separate them. Compression is all work
    on gradients or weights before they are sent; it is None too if Horovod takes gradients as they are. Overlapped
    communication runs during compute and is not part of the sum. Waiting is the time until the last rank has asked for
    a collective, negotiation the time from then until Horovod starts it.
    """

    step_ms: Spread
    input_ms: Spread
    compute_ms: Spread
    forward_ms: Spread | None
    backward_ms: Spread | None
    compression_ms: Spread | None
    update_ms: Spread | None
    exposed_communication_ms: Spread
    negotiation_ms: Spread
    waiting_ms: Spread
    gaps_ms: Spread
    overlapped_communication_ms: Spread

    def parts(self) -> dict[Bound, Spread]:
        """The parts that add up to a step, in the order in which they are shown."""
        return {
            "input": self.input_ms,
            "compute": self.compute_ms,
            "communication": self.exposed_communication_ms,
            "negotiation": self.negotiation_ms,
            "waiting": self.waiting_ms,
            "gaps": self.gaps_ms,
        }


class Rank(_Strict):
    """One rank's steps. `clock_offset_ms` relates its clock to rank 0's, within `clock_error_ms`."""

    rank: Size
    host: str
    clock_offset_ms: float
    clock_error_ms: Time
    split: Split


class Communication(_Strict):
    """One collective of a step, after fusion: `bytes` is a rank's input, `ms` the median duration.

    `start_ms` is counted from backward's start, None if it is unknown. `link_bytes` is what the busiest link carries
    for it in one direction: between hosts if there are several (0 for a collective within hosts), else between ranks.
    It is None in files of older versions.
    """

    operation: str
    tensors: Count
    bytes: Size
    start_ms: float | None
    ms: Time
    link_bytes: Time | None = None


class Latency(_Strict):
    """A collective of `bytes` a rank, timed by itself between steps, `samples` times on all ranks at the same time."""

    operation: str
    bytes: Size
    ms: Spread
    samples: Count


class Link(_Strict):
    """`rated` is the interface's nominal rate, `measured` the best of a collective alone, `achieved` the one in a step.

    The last two are bus bandwidth: what a ring of n ranks carries (2(n-1)/n of the bytes of an allreduce). For another
    algorithm `achieved` is what the busiest link carries while it is in use. None if unknown, or with one rank.
    """

    interface: str | None
    rated_mbit_per_s: Rate | None
    measured_mbit_per_s: Rate | None
    achieved_mbit_per_s: Rate | None


class Slowest(_Strict):
    """The rank that the others wait for most: `behind_ms` after the first (mean), last in `last_share` of the steps."""

    rank: Size
    host: str
    behind_ms: Time
    last_share: Annotated[float, Field(ge=0, le=1)]


class Cost(_Strict):
    """What the trace events cost: median step times with and without them, in alternating groups of a few steps.

    `turns` counts pairs of a group with and a group without. `percent` is the median of the pairs' differences,
    `low_percent` to `high_percent` their range (None in profiles of earlier versions).
    """

    with_ms: Time
    without_ms: Time
    percent: float
    turns: Count
    low_percent: float | None = None
    high_percent: float | None = None


class Tuning(_Strict):
    """Horovod's settings while the steps were measured."""

    cycle_time_ms: Time
    fusion_threshold_bytes: Size
    cache_capacity: Size


class Memory(_Strict):
    """Memory of the largest rank. `device_peak_mib` is None on devices without memory of their own."""

    parameter_bytes: Size
    optimizer_bytes: Size
    peak_rss_mib: Time
    device_peak_mib: Time | None


class Profile(_Strict, Result):
    """`profile.json`. `tensors` are in the order in which backward finishes them.

    `step` is the mean over `ranks`. `bytes_per_step` is what a rank sends. `settings` is the resolved recipe, from
    which `hvdkit advise` writes a changed one. `batch_size` (images) and `threads` are per rank. A step is an update,
    of `accumulate` batches. `published` describes the published figure from which all else follows, None if the profile
    was measured.
    """

    schema_version: Annotated[Literal[1], json_files.version(1, "profile again with this hvdkit")]
    hvdkit_version: str
    framework: str
    framework_version: str
    horovod_version: str | None
    recipe: str
    settings: dict[str, Any]
    model: str
    np: Count
    hosts: Count
    launcher: str
    device: str
    processor: str
    threads: Count
    batch_size: Count
    accumulate: Count
    precision: str
    compression: str
    measured_steps: Count
    tensors: Annotated[list[Tensor], Field(min_length=1)]
    layers: Annotated[list[Layer], Field(min_length=1)]
    step: Split
    ranks: Annotated[list[Rank], Field(min_length=1)]
    slowest: Slowest | None
    bound: Bound
    communications: list[Communication]
    bytes_per_step: Size
    latencies: list[Latency]
    link: Link
    tuning: Tuning
    memory: Memory
    cost: Cost | None
    published: str | None = None

    def records(self) -> list[dict[str, Any]]:
        """A row for each part of a step, with its mean time and its share of the step, and for the whole step."""
        parts = [*self.step.parts().items(), ("step", self.step.step_ms)]
        whole = self.step.step_ms.mean or None
        return [{"part": name, **spread.model_dump(), "share": whole and spread.mean / whole} for name, spread in parts]

    @model_validator(mode="after")
    def _check_names(self) -> Profile:
        layers = {layer.name for layer in self.layers}
        if len(layers) != len(self.layers):
            raise ValueError("layers: expected each name once")
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ValueError("tensors: expected each name once")
        before = 0.0
        for tensor in self.tensors:
            if tensor.layer not in layers:
                raise ValueError(f"tensors: {tensor.name}: expected one of the layers, got {tensor.layer}")
            if tensor.ready_ms < before:
                raise ValueError(f"tensors: {tensor.name}: expected ready_ms >= {before}, got {tensor.ready_ms}")
            before = tensor.ready_ms
        if len(self.ranks) != self.np or any(rank.rank != place for place, rank in enumerate(self.ranks)):
            raise ValueError(f"ranks: expected 0 to {self.np - 1} in order")
        return self


def load(path: Path) -> Profile:
    """Read a `profile.json`. Raises RequestError if it is missing, damaged or of another version."""
    return json_files.read(Profile, path, "the profile.json of `hvdkit profile`")


def save(profile: Profile, path: Path) -> None:
    """Write it. Raises RunError if that fails."""
    write_atomic(path, profile.model_dump_json(indent=2) + "\n")
