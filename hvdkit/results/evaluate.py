"""The schema of `evaluate.json`."""

from __future__ import annotations

from pathlib import Path

from hvdkit.results.json_files import Figures, read


class EvaluationResult(Figures):
    """`evaluate.json`: a checkpoint `trained_by` one framework and evaluated by `framework`. `loss` is a mean."""

    framework: str
    framework_version: str
    hvdkit_version: str
    recipe: str
    model: str
    np: int
    trained_by: str
    step: int
    correct: int
    total: int
    accuracy: float
    loss: float


def read_evaluation(path: Path) -> EvaluationResult:
    """Read an `evaluate.json`. Raises RequestError if it is missing or damaged."""
    return read(EvaluationResult, path, "the result of an evaluation")
