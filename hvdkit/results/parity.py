"""The schema of `parity.json`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from hvdkit.results.json_files import Figures, Result
from hvdkit.results.machine import Machine

# Largest errors that pass, in float64; batches and initial weights must be equal bit by bit.
MARKS = {
    "logits_f64": 1e-11,
    "gradients_f64": 1e-9,
    "applied_f64": 1e-12,
    "buffers_f64": 1e-9,
    "weights_f64": 1e-9,
    "losses_f64": 1e-8,
    "step_f64": 1e-9,
    "evaluation_f64": 1e-9,
}


class FrameworkParity(Figures):
    """One framework against the reference: relative errors, in float64 (`_f64`) and float32 (`_f32`).

    `logits` and `gradients` are of the first batch on the initial weights. In float32 they are the worst of the first
    five batches, against the reference's float64, and `reference_…_f32` is the error of the reference's own float32.
    `applied` is the averaged gradient against the mean of the ranks' own. `buffers` and `weights` are after one step.
    `losses` is the worst of the first five of a free run. `step` is the worst tensor (weights, buffers, slots) over all
    steps from the reference's states (`worst_step` counts from 1). `evaluation` is the worst of logits and loss. A
    wrong count or NaN, which has no error, is recorded as 1e300. `missed` names the figures above their limits.
    What trains in float32 alone has `f32_excess`: its `_f64` figures compare float32 with the reference's float64. For
    each there is the largest of its errors over the limit, `f32_factor` times the error of the reference trained in
    float32 and at least 1e-5; up to 1 passes.
    """

    passed: bool
    missed: list[str]
    f32_factor: float
    version: str
    batches_equal: bool
    initial_weights_equal: bool
    logits_f64: float
    gradients_f64: float
    worst_gradient: str
    applied_f64: float
    buffers_f64: float
    worst_buffer: str
    weights_f64: float
    worst_weight: str
    losses_f64: float
    step_f64: float
    worst_step: int
    evaluation_f64: float
    evaluation_correct: int
    evaluation_total: int
    logits_f32: float
    gradients_f32: float
    reference_logits_f32: float
    reference_gradients_f32: float
    first_deviation: str | None
    likely_cause: str | None
    gradient_errors_f64: dict[str, float]
    gradient_errors_f32: dict[str, float]
    reference_gradient_errors_f32: dict[str, float]
    step_errors_f64: list[float]
    f32_excess: dict[str, float] | None = None


class Parity(Figures, Result, file="parity.json", of="the parity.json of `hvdkit parity`"):
    """`parity.json`. `recipe_keys` has the settings of the recipe that the result holds for, by dotted key.

    `hosts` has the host of each rank. `marks` are the largest errors that pass. In float32 the limit is the framework's
    `f32_factor` times the reference's error.
    """

    passed: bool
    reference: str
    recipe: str
    model: str
    optimizer: str
    batch_size: int
    np: int
    hosts: list[str] = Field(default_factory=list)
    steps: int
    seed: int
    recipe_keys: dict[str, Any]
    marks: dict[str, float]
    frameworks: Annotated[dict[str, FrameworkParity], Field(min_length=1)]
    machine: Machine

    @property
    def in_float64(self) -> dict[str, FrameworkParity]:
        """The frameworks that trained in float64."""
        return {name: framework for name, framework in self.frameworks.items() if framework.f32_excess is None}

    @property
    def divided(self) -> bool:
        """Whether ranks divided the model; the reference's had it whole, and `logits` are cross-entropies by target."""
        return "parallel.pipeline" in self.recipe_keys

    @property
    def checks(self) -> list[str]:
        """The keys of `marks`, without that of running statistics for a model that has none."""
        has_buffers = any(framework.worst_buffer for framework in self.frameworks.values())
        return [key for key in self.marks if has_buffers or key != "buffers_f64"]

    def records(self) -> list[dict[str, Any]]:
        """A row for each framework, without the errors by tensor and by step."""
        lists = {key for key in FrameworkParity.model_fields if "_errors_" in key} | {"f32_excess"}
        return [{"framework": name} | judged.model_dump(exclude=lists) for name, judged in self.frameworks.items()]

    @field_validator("marks")
    @classmethod
    def _check_marks(cls, marks: dict[str, float]) -> dict[str, float]:
        if marks.keys() != MARKS.keys():
            raise ValueError(f"expected {', '.join(MARKS)}, got {', '.join(marks) or 'none'}")
        return marks


read_parity = Parity.read
