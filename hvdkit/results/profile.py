"""The schema of `profile.json`: where the time of a run's steps goes; the input of the simulator.

Times are milliseconds, sizes bytes, rates 10^6 bits per second.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hvdkit.files import write_atomic
from hvdkit.results import batch_times
from hvdkit.results.batch_times import BatchFit, BatchTime, Time
from hvdkit.results.json_files import Result, StrictRecord

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# Bounds beyond all machines, within which sums and products stay numbers.
Size = Annotated[int, Field(ge=0, le=10**15)]
Count = Annotated[int, Field(ge=1, le=2**40)]
Rate = Annotated[float, Field(gt=0, le=1e9)]
Bound = Literal["compute", "communication", "negotiation", "waiting", "input", "gaps"]


def version(expected: int, remedy: str) -> BeforeValidator:
    """Refuses the file of another version of the schema, and says what to do."""

    def check(value: Any) -> Any:
        if type(value) is int and value != expected:
            raise ValueError(f"expected {expected}, got {value}; {remedy}")
        return value

    return BeforeValidator(check)


class Spread(StrictRecord):
    """A time over the measured steps."""

    mean: Time = Field(description="mean over the measured steps; means add up")
    median: Time = Field(description="median")
    low: Time = Field(description="10th percentile")
    high: Time = Field(description="90th percentile")

    @model_validator(mode="after")
    def _check_order(self) -> Spread:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"expected low <= median <= high, got {self.low}, {self.median}, {self.high}")
        return self


class Tensor(StrictRecord):
    """A gradient."""

    name: str = Field(description="name of the parameter")
    shape: list[Size] = Field(description="its shape")
    dtype: Literal["float64", "float32", "float16", "bfloat16"] = Field(description="type of the gradient in memory")
    bytes: Size = Field(description="size of the gradient in memory, before compression")
    ready_ms: Time = Field(description="when backward finishes it, from backward's start (median)")
    layer: str = Field(description="name of one of `layers`")

    @model_validator(mode="after")
    def _check_size(self) -> Tensor:
        expected = prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.bytes != expected:
            raise ValueError(f"bytes: expected {expected} for {self.shape} in {self.dtype}, got {self.bytes}")
        return self


class Layer(StrictRecord):
    """A layer, with the medians of its times and, where several batch sizes were measured, their fits."""

    name: str = Field(description="name of the layer")
    kind: str = Field(description="conv, norm, dense or other")
    forward_ms: Time | None = Field(description="median time of forward; null: the framework has none")
    backward_ms: Time | None = Field(description="median time of backward; null: the framework has none")
    forward_fit: BatchFit | None = Field(None, description="forward by batch size; null: one size was measured")
    backward_fit: BatchFit | None = Field(None, description="backward by batch size; null: one size was measured")


class StepSplit(StrictRecord):
    """Where the time of a step goes; the means of all but overlapped communication add up."""

    step_ms: Spread = Field(
        description="the whole step: the sum of input, compute, exposed communication, negotiation, waiting and gaps"
    )
    input_ms: Spread = Field(description="waiting for the batch")
    compute_ms: Spread = Field(description="forward, backward, compression and update")
    forward_ms: Spread | None = Field(description="forward; null: not separated")
    backward_ms: Spread | None = Field(description="backward of all batches of the step; null: not separated")
    compression_ms: Spread | None = Field(
        description="all work on gradients before they are sent; null: Horovod takes them as they are"
    )
    update_ms: Spread | None = Field(description="the optimizer; null: not separated")
    exposed_communication_ms: Spread = Field(description="communication under which nothing is computed")
    negotiation_ms: Spread = Field(
        description="from when the last rank has asked for a collective until Horovod starts it"
    )
    waiting_ms: Spread = Field(description="until the last rank has asked for a collective")
    gaps_ms: Spread = Field(description="work between steps")
    overlapped_communication_ms: Spread = Field(description="communication during compute, which is no part of the sum")

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


class ProfiledRank(StrictRecord):
    """One rank's steps."""

    rank: Size = Field(description="its number")
    host: str = Field(description="its host")
    clock_offset_ms: float = Field(description="its clock against rank 0's")
    clock_error_ms: Time = Field(description="how far that may be off")
    split: StepSplit = Field(description="where the time of its steps goes")


class Communication(StrictRecord):
    """One collective of a step, after fusion."""

    operation: str = Field(description="the collective")
    tensors: Count = Field(description="gradients fused into it")
    bytes: Size = Field(description="input of a rank")
    start_ms: float | None = Field(description="from backward's start; null: unknown")
    ms: Time = Field(description="median duration")
    link_bytes: Time | None = Field(
        None, description="what the busiest link carries for it in one direction; null in older files"
    )


class Latency(StrictRecord):
    """A collective that was timed by itself between steps, on all ranks at the same time."""

    operation: str = Field(description="the collective")
    bytes: Size = Field(description="input of a rank")
    ms: Spread = Field(description="its time, by itself between steps")
    samples: Count = Field(description="how often it was timed")


class Link(StrictRecord):
    """The network, in bus bandwidth: what a ring of n ranks carries (2(n-1)/n of the bytes of an allreduce), or of n
    hosts where ranks share memory.

    For another algorithm the rate in a step is what the busiest link carries while it is in use. None: one rank, or
    unknown.
    """

    interface: str | None = Field(description="network interface; null: unknown")
    rated_mbit_per_s: Rate | None = Field(description="its nominal rate; null: unknown")
    measured_mbit_per_s: Rate | None = Field(description="best bus bandwidth of a collective alone")
    achieved_mbit_per_s: Rate | None = Field(description="bus bandwidth in a step")


class Slowest(StrictRecord):
    """The rank that the others wait for most."""

    rank: Size = Field(description="the rank that the others wait for most")
    host: str = Field(description="its host")
    behind_ms: Time = Field(description="how long after the first it asks for a collective, on average")
    last_share: Annotated[float, Field(ge=0, le=1)] = Field(description="part of the steps in which it is the last")


class Cost(StrictRecord):
    """What the trace events cost: step times with and without them, in alternating groups of a few steps."""

    with_ms: Time = Field(description="median step with trace events")
    without_ms: Time = Field(description="median step without them")
    percent: float = Field(description="median difference")
    turns: Count = Field(description="pairs of a group of steps with and one without")
    low_percent: float | None = Field(None, description="smallest difference of a pair; null in older files")
    high_percent: float | None = Field(None, description="largest difference of a pair; null in older files")


class Tuning(StrictRecord):
    """Horovod's settings while the steps were measured."""

    cycle_time_ms: Time = Field(description="Horovod's cycle time while steps were measured")
    fusion_threshold_bytes: Size = Field(description="Horovod's fusion threshold")
    cache_capacity: Size = Field(description="entries of Horovod's response cache")


class Memory(StrictRecord):
    """Memory of the largest rank."""

    parameter_bytes: Size = Field(description="all parameters")
    optimizer_bytes: Size = Field(description="state of the optimizer")
    peak_rss_mib: Time = Field(description="memory of the largest process")
    device_peak_mib: Time | None = Field(
        description="largest use of a device's memory; null: it has none of its own, or unknown"
    )


class Profile(StrictRecord, Result, file="profile.json", of="the profile.json of `hvdkit profile`"):
    """`profile.json`. A step is an update, of `accumulate` batches; `batch_size` and `threads` are per rank."""

    schema_version: Annotated[Literal[1], version(1, "profile again with this hvdkit")] = Field(
        description="version of this kind of file"
    )
    hvdkit_version: str = Field(description="version of hvdkit that wrote it")
    framework: str = Field(description="framework, or `published`")
    framework_version: str = Field(description="its version")
    horovod_version: str | None = Field(description="Horovod's version; null: none")
    recipe: str = Field(description="name of the recipe")
    settings: dict[str, Any] = Field(
        description="the resolved recipe, from which `advise --new-recipe` writes a changed one"
    )
    model: str = Field(description="the model")
    np: Count = Field(description="ranks")
    hosts: Count = Field(description="hosts")
    shared_memory_ranks: int = Field(
        0, ge=0, description="ranks of rank 0's host that exchange tensors through memory; 0: through sockets"
    )
    launcher: str = Field(description="how the ranks were started")
    device: str = Field(description="`cpu`, or a kind of accelerator")
    processor: str = Field(description="name of the processor or GPU")
    threads: Count = Field(description="threads of a rank")
    batch_size: Count = Field(description="samples of a rank in a batch")
    accumulate: Count = Field(description="batches of a step")
    precision: str = Field(description="as in the recipe")
    compression: str = Field(description="method of the recipe")
    measured_steps: Count = Field(description="steps that were measured")
    tensors: Annotated[list[Tensor], Field(min_length=1)] = Field(
        description="gradients, in the order in which backward finishes them"
    )
    layers: Annotated[list[Layer], Field(min_length=1)] = Field(description="layers, in the order of forward")
    step: StepSplit = Field(description="where the time of a step goes, mean over the ranks")
    ranks: Annotated[list[ProfiledRank], Field(min_length=1)] = Field(description="the same for each rank")
    slowest: Slowest | None = Field(
        description="the rank that the others wait for; null: one rank, or nothing was reduced"
    )
    bound: Bound = Field(description="the largest part of the step")
    communications: list[Communication] = Field(description="collectives of a step")
    bytes_per_step: Size = Field(description="what a rank sends in a step")
    latencies: list[Latency] = Field(description="collectives, timed alone")
    link: Link = Field(description="the network interface and its rates")
    tuning: Tuning = Field(description="Horovod's settings")
    memory: Memory = Field(description="memory of the largest rank")
    cost: Cost | None = Field(description="what the trace events cost; null: unknown")
    published: str | None = Field(
        None, description="the published figure from which all else follows; null: it was measured"
    )
    batches: list[BatchTime] = Field([], description="times by batch size, of `--batch-sizes`")
    unit: str = Field("images", description="what speeds count, in the plural")
    units_per_sample: Count = Field(1, description="of them in a sample, such as the tokens of a window")
    train_samples: Count | None = Field(None, description="samples of an epoch; null: unknown")

    def records(self) -> list[dict[str, Any]]:
        """A row for each part of a step, with its mean time and its share of the step, and for the whole step."""
        parts = [*self.step.parts().items(), ("step", self.step.step_ms)]
        total = self.step.step_ms.mean or None
        return [{"part": name, **spread.model_dump(), "share": total and spread.mean / total} for name, spread in parts]

    @model_validator(mode="after")
    def _check_batches(self) -> Profile:
        if fault := batch_times.faults(self.batches, self.batch_size, len(self.layers), len(self.tensors)):
            raise ValueError(fault)
        return self

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
        if len(self.ranks) != self.np or any(rank.rank != index for index, rank in enumerate(self.ranks)):
            raise ValueError(f"ranks: expected 0 to {self.np - 1} in order")
        return self


def save(profile: Profile, path: Path) -> None:
    """Write it. Raises RunError if that fails."""
    write_atomic(path, profile.model_dump_json(indent=2) + "\n")


def compute_ms(profile: Profile) -> float:
    """Forward and backward of all batches of an update: what the simulator scales with the batch size."""
    split = profile.step
    other = sum(spread.mean for spread in (split.compression_ms, split.update_ms) if spread)
    return max(1e-6, split.compute_ms.mean - other)


load = Profile.read
