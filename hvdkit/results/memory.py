"""The schema of `memory.json`: the memory that a recipe needs, by part, at each stage of sharding."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hvdkit.results.json_files import Count, Figures, Result

Stage = Literal["none", "optimizer", "gradients", "parameters"]


class Parts(Figures):
    """Bytes of the rank that needs the most, by what is kept in them.

    They are what tensors take, and the framework's own as it was measured before training. Scratch space of kernels and
    what allocators lose come on top, but for `copies` and `scratch` of frameworks of which they are known on CPUs.
    """

    parameters: Count = Field(description="weights, in fp32 (fp64): in bf16 and fp16 these are the masters")
    gradients: Count = Field(description="gradients, twice with accumulate above 1")
    optimizer: Count = Field(description="the optimizer's slots")
    average: Count = Field(default=0, description="the averaged weights")
    casts: Count = Field(description="copies of the weights in bf16 or fp16, which compute")
    gathered: Count = Field(description="blocks whose parameters a rank has only while they compute")
    communication: Count = Field(description="Horovod's fusion buffer; what compression and Local SGD keep")
    activations: Count | None = Field(description="what forward keeps for backward; null: unknown")
    batch: Count | None = Field(description="samples and targets; null: unknown")
    copies: Count = Field(default=0, description="on CPUs, in a pipeline: a microbatch's gradients, and the means")
    scratch: Count = Field(default=0, description="on CPUs: what backward takes besides, and memory left in pieces")
    framework: Count = Field(description="the framework's own, before a model is there")
    start: Count = Field(default=0, description="what the start or a checkpoint needs beyond a step")

    @property
    def total(self) -> int:
        """All parts that are known."""
        return sum(value or 0 for _, value in self)


class MemoryRow(Figures):
    """A number of ranks and a stage of sharding. What is not known, or was not asked for, is None.

    Of a model that is divided over ranks, a row is of the ranks that have one stage of its blocks, `held_by`.
    """

    ranks: Count
    stage: Stage
    held_by: list[int] | None = None
    parts: Parts
    total_bytes: Count
    sent_bytes_per_step: Count | None = Field(description="bytes that a rank sends in a step without compression")
    supported: bool = Field(description="whether hvdkit trains so under the framework")
    fits: bool | None = Field(description="whether the device has as much memory to fill")
    largest_batch: Count | None = Field(description="the largest batch_size that fits; 0: none does")


class MemoryNeed(Figures, Result, file="memory.json"):
    """`memory.json`. `framework_source` says where the framework's own bytes come from.

    `room_bytes` is what of the device's memory, `device_bytes`, a rank may fill: nine tenths of a GPU's.
    """

    schema_version: Literal[1] = 1
    recipe: str
    model: str
    parameters: Count
    batch_size: Count
    precision: str
    recompute: bool
    framework: str
    framework_source: str
    device: str | None
    device_bytes: Count | None
    room_bytes: Count | None = None
    rows: list[MemoryRow]
    notes: list[str] = Field(default_factory=list)

    def cheapest(self, ranks: int) -> Stage | None:
        """The first stage that fits at so many ranks, which sends the least, of those that are supported."""
        return next((row.stage for row in self.rows if row.ranks == ranks and row.fits and row.supported), None)

    def records(self) -> list[dict[str, Any]]:
        """A row for each number of ranks and stage, its parts as `parameters_bytes` and so on."""
        return [
            row.model_dump(exclude={"parts"}) | {f"{name}_bytes": value for name, value in row.parts}
            for row in self.rows
        ]
