"""The schema of `plan.json`: the ways to train a model on a cluster, in the order in which they are tried."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hvdkit.results.json_files import Count, Figures, Result
from hvdkit.results.memory import Parts

RungName = Literal[
    "as it is",
    "smaller batch",
    "recompute",
    "precision",
    "input size",
    "sharding: optimizer",
    "sharding: gradients",
    "sharding: parameters",
    "pipeline",
    "tensor",
    "tensor and pipeline",
]


class Rung(Figures):
    """A way to train. What is not known is None.

    `changes` are keys of the recipe, with dots, as they are given to `hvdkit train`; with them memory is that of
    `parts`. An update takes the same samples on all rungs. `supported` says whether hvdkit trains so under the
    framework on such a device. `changes_result` says that the same samples give other weights than those of the
    recipe, beyond rounding. `why` says why it was chosen, or why not.
    """

    name: RungName
    changes: dict[str, Any]
    batch_size: Count
    accumulate: Count
    data_ranks: Count
    parts: Parts | None
    total_bytes: Count | None = Field(description="memory of the rank with the most")
    fits: bool | None
    supported: bool
    changes_result: bool
    step_ms: float | None = Field(None, description="an update, expected from `low_ms` to `high_ms`")
    low_ms: float | None = None
    high_ms: float | None = None
    samples_per_second: float | None = None
    chosen: bool = False
    why: str = ""

    @property
    def possible(self) -> bool:
        """Whether it can be trained so, as far as that is known."""
        return self.fits is not False and self.supported


class Ladder(Figures, Result, file="plan.json"):
    """`plan.json`. `asked_ranks` may be more than `ranks`, where an epoch has too few samples for them.

    `room_bytes` is what of a device's memory, `device_bytes`, a rank may fill.
    """

    schema_version: Literal[1] = 1
    recipe: str
    model: str
    parameters: Count
    framework: str
    cluster: str
    device: str
    device_bytes: Count | None
    room_bytes: Count | None
    asked_ranks: Count
    ranks: Count
    samples_per_update: Count
    profile: str | None = Field(description="what the predicted steps are from; null: nothing was predicted")
    rungs: list[Rung]
    notes: list[str] = Field(default_factory=list)

    @property
    def chosen(self) -> Rung | None:
        """The way to train; None if there is none on this cluster."""
        return next((rung for rung in self.rungs if rung.chosen), None)

    def records(self) -> list[dict[str, Any]]:
        """A row for each rung, its parts as `parameters_bytes` and so on."""
        return [
            rung.model_dump(exclude={"parts"}) | {f"{name}_bytes": value for name, value in rung.parts or ()}
            for rung in self.rungs
        ]
