"""The schema of `evaluate.json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hvdkit.results.json_files import OfCheckpoint, Result
from hvdkit.results.train import readable


class EvaluationResult(OfCheckpoint, Result, file="evaluate.json", of="the result of an evaluation"):
    """`evaluate.json`: a checkpoint that is evaluated on `total` samples. `hosts` has the host of each rank.

    `metrics` are the means of the task's metrics by name. Those of a classifier are `accuracy` and `loss` too, and
    `correct` counts its right answers.
    """

    recipe: str
    np: int
    hosts: list[str] = Field(default_factory=list)
    correct: int | None = None
    total: int
    accuracy: float | None = None
    loss: float | None = None
    metrics: dict[str, float] | None = None

    def records(self) -> list[dict[str, Any]]:
        """One row, with a column for each of `metrics`."""
        return [self.model_dump(exclude={"metrics", "hosts"}) | (self.metrics or {})]

    @property
    def line(self) -> str:
        """The result in a line."""
        shown, parts = dict(self.metrics or {}), []
        if self.accuracy is not None and self.loss is not None:
            parts = [f"correct {self.correct} of {self.total} ({100 * self.accuracy:.2f} %)", f"loss {self.loss:.6f}"]
            shown = {name: value for name, value in shown.items() if name not in ("accuracy", "loss")}
        values = ", ".join([*parts, *(f"{readable(name)} {value:.6g}" for name, value in shown.items())])
        of = ", averaged weights" if self.averaged else ""
        return f"{self.framework} {self.framework_version}, step {self.step} by {self.trained_by}{of}: {values}"


read_evaluation = EvaluationResult.read
