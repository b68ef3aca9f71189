"""`profile.json`: what `hvdkit profile` found out about a run's steps, and what the simulator starts from.

Times are milliseconds, sizes bytes, rates 10^6 bits a second. Nothing in it names a framework but the field that says
which it was.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hvdkit.errors import RequestError, first_fault
from hvdkit.files import read_bounded, write_atomic

SCHEMA_VERSION = 1
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

Time = Annotated[float, Field(ge=0)]
Size = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Bound = Literal["compute", "communication", "negotiation", "waiting", "input", "gaps"]
_R = TypeVar("_R", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Spread(_Record):
    """A time over the measured steps: means add up, medians are for people; `low` and `high` hold the middle 80 %."""

    mean: Time
    median: Time
    low: Time
    high: Time

    @model_validator(mode="after")
    def _ordered(self) -> Spread:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"expected low <= median <= high, got {self.low}, {self.median}, {self.high}")
        return self


class Tensor(_Record):
    """A gradient. `ready_ms` is when backward has finished it, counted from backward's start (median).

    `bytes` are those of the gradient in memory, in `dtype`, before any compression. `layer` names one of the layers.
    """

    name: str
    shape: list[Size]
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    bytes: Size
    ready_ms: Time
    layer: str

    @model_validator(mode="after")
    def _sized(self) -> Tensor:
        expected = prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.bytes != expected:
            raise ValueError(f"bytes: expected {expected} for {self.shape} in {self.dtype}, got {self.bytes}")
        return self


class Layer(_Record):
    """One layer with its median times; None where the framework cannot tell. `kind` is conv, norm, dense or other."""

    name: str
    kind: str
    forward_ms: Time | None
    backward_ms: Time | None


class Split(_Record):
    """Where the time of a step went.

    input + compute + exposed_communication + negotiation + waiting + gaps = step, in their means. Compute is forward +
    backward + compression + update, and those are None where the framework cannot tell them apart; compression, and all
    else that is done to gradients or weights to be sent, is also None where Horovod takes gradients as they are.
    Overlapped communication lies under compute and is no part of the sum. Negotiation is the wait until Horovod has
    begun what all ranks have asked for, waiting the wait for the last rank to ask.
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
        """What adds up to a step, in the order in which it is told."""
        return {
            "input": self.input_ms,
            "compute": self.compute_ms,
            "communication": self.exposed_communication_ms,
            "negotiation": self.negotiation_ms,
            "waiting": self.waiting_ms,
            "gaps": self.gaps_ms,
        }


class Rank(_Record):
    """One rank's steps. Its clock has been put on rank 0's by `clock_offset_ms`, sure to `clock_error_ms`."""

    rank: Size
    host: str
    clock_offset_ms: float
    clock_error_ms: Time
    split: Split


class Communication(_Record):
    """One collective of a step, after fusion: `bytes` is what a rank puts in, `ms` its median duration.

    `start_ms` is counted from backward's start, None where its begin cannot be told from its end. `link_bytes` is what
    the busiest link carries for it one way: of those between hosts where there are several (0 for what stays inside of
    them), else of those between ranks. None in a file of before it was told.
    """

    operation: str
    tensors: Count
    bytes: Size
    start_ms: float | None
    ms: Time
    link_bytes: Time | None = None


class Latency(_Record):
    """A collective of `bytes` a rank, timed by itself between steps, `samples` times on all ranks at once."""

    operation: str
    bytes: Size
    ms: Spread
    samples: Count


class Link(_Record):
    """`rated` is what the interface says, `measured` the best that a collective alone reached, `achieved` a step's.

    The last two are bus bandwidth, what a ring of that many ranks has to carry (2(n-1)/n of the bytes of an allreduce);
    where a step adds up another way, what that makes the busiest link carry, while something crosses it.
    None where it is not known, or where one rank communicates with nobody.
    """

    interface: str | None
    rated_mbit_per_s: Rate | None
    measured_mbit_per_s: Rate | None
    achieved_mbit_per_s: Rate | None


class Slowest(_Record):
    """The rank for which the others wait most, `behind_ms` a step (mean) after the first; `last_share` of all steps."""

    rank: Size
    host: str
    behind_ms: Time
    last_share: Annotated[float, Field(ge=0, le=1)]


class Cost(_Record):
    """What profiling itself costs: step times with and without it, in turns of a few steps each."""

    with_ms: Time
    without_ms: Time
    percent: float
    turns: Count


class Tuning(_Record):
    """Horovod's settings while the steps were measured."""

    cycle_time_ms: Time
    fusion_threshold_bytes: Size
    cache_capacity: Size


class Memory(_Record):
    """Of the largest rank. `device_peak_mib` is None where there is no device of its own memory."""

    parameter_bytes: Size
    optimizer_bytes: Size
    peak_rss_mib: Time
    device_peak_mib: Time | None


class Profile(_Record):
    """All of it. `tensors` are in the order in which backward finishes them.

    `step` is the mean over `ranks`. `bytes_per_step` is what a rank sends. `settings` is the resolved recipe, so that a
    changed one can be written from it. `batch_size` (images) and `threads` are a rank's, `accumulate` batches make an
    update, and a step is an update.
    """

    schema_version: Literal[1]
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

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
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
    """Read a `profile.json`. Raises RequestError, one line with file and key, where it is missing, damaged or other."""
    try:
        content = read_bounded(path)
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); expected the profile.json of `hvdkit profile`"
        ) from None
    version = _validated(_Versioned, path, content).schema_version
    if version != SCHEMA_VERSION:
        raise RequestError(
            f"{path}: schema_version: expected {SCHEMA_VERSION}, got {version}; profile again with this hvdkit"
        )
    return _validated(Profile, path, content)


def save(profile: Profile, path: Path) -> None:
    """Write it. Raises RunError where the disk does not allow it."""
    write_atomic(path, profile.model_dump_json(indent=2) + "\n")


class _Versioned(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    schema_version: int


def _validated(kind: type[_R], path: Path, content: bytes) -> _R:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise RequestError(f"{path}: not the profile.json of `hvdkit profile`: {first_fault(error)}") from None
