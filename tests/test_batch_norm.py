"""TensorFlow's and Keras' float32 batch norm is as exact as PyTorch's, also where most values are equal."""

from __future__ import annotations

from statistics import median

from benchmarks import harness
from benchmarks.batch_norm import KERNELS, measure


def errors(kernel: str) -> list[float]:
    """The median by shape and kind of the values."""
    runtime, _ = KERNELS[kernel]
    return [median(row["errors"]) for row in harness.elsewhere(measure, runtime, kernel=kernel)]


def test_errors_are_like_pytorchs() -> None:
    fused, ours, theirs = map(errors, ("TensorFlow, fused", "TensorFlow, hvdkit's", "PyTorch"))
    assert len(ours) == 6 and all(own <= 3 * other for own, other in zip(ours, theirs, strict=True)), (ours, theirs)
    assert max(fused) > 10 * max(theirs), "the fused kernel alone would do"
