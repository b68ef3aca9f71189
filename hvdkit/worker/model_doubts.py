"""What a model of the user's own does on one batch that can hardly be meant: a line each, before training."""

from __future__ import annotations

import numpy as np

from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.data.dataset import Batch, arguments, mapped
from hvdkit.errors import RequestError
from hvdkit.tasks.task import Metrics

# Of the largest output. Kernels round by a sample's place in the batch; activations of 16 bits have 8 or 11 digits.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
_TOLERANCE_16_BITS = 5e-2
_ONE = 1e-3  # by which probabilities may differ from 1 in their sum
_ADDED = 1e-4  # relative, for sums of float32 in another order


def doubts(session: Session, precision: str, batch: Batch, outputs: np.ndarray) -> list[str]:
    """A warning for each doubt about the model. `outputs` (n, …) are those of the batch.

    The model is called again in evaluation mode, once or twice. Raises RequestError for a model that changes the
    samples of a split.
    """
    return [
        *_probabilities(session, outputs),
        *_other_samples(session, PRECISIONS[precision].compute, batch, outputs),
    ]


def _probabilities(session: Session, outputs: np.ndarray) -> list[str]:
    """Outputs that are a softmax already, where the recipe's cross-entropy computes one."""
    if session.custom_loss is not None or outputs.ndim < 2 or outputs.shape[-1] < 2 or not outputs.size:
        return []
    if outputs.min() < 0 or abs(outputs.sum(axis=-1, dtype=np.float64) - 1).max() > _ONE:
        return []
    return [
        "model: its outputs are probabilities (from 0 to 1, with the sum 1), but cross-entropy takes logits and "
        "computes the softmax itself; leave the last softmax out"
    ]


def _other_samples(session: Session, compute: str, batch: Batch, outputs: np.ndarray) -> list[str]:
    """Outputs in evaluation mode that are random, or that depend on the other samples of the batch."""
    half = len(outputs) // 2
    before = mapped(np.copy, batch.inputs)
    if half == 0 or not np.isfinite(outputs).all():
        return []
    others = mapped(lambda each: np.concatenate([each[:half], each[: len(each) - half]]), before)
    limit = _TOLERANCE.get(compute, _TOLERANCE_16_BITS) * abs(outputs).max()
    again = session.predict(batch.inputs)
    _check_unchanged(batch, before)
    if abs(again - outputs).max() > limit:
        return [
            "model: two calls in evaluation mode give different outputs for the same samples, so validation is random; "
            "switch dropout and other noise off in evaluation (in PyTorch: nn.Dropout, or "
            "functional.dropout(x, training=self.training))"
        ]
    if abs(session.predict(others)[:half] - outputs[:half]).max() > limit:
        return [
            "model: the outputs for a sample depend on the other samples of its batch in evaluation mode, so "
            "validation depends on batch_size; give batch norm running statistics (track_running_stats)"
        ]
    return []


def _check_unchanged(batch: Batch, before: object) -> None:
    for array, copy in zip(arguments(batch.inputs), arguments(before), strict=True):
        if array.base is not None and not np.array_equal(array, copy, equal_nan=array.dtype.kind == "f"):
            raise RequestError(
                "model: it changes its inputs in place, and they are a view of the split's own arrays, so that the "
                "samples would change with each use; compute out of place, or return a copy from `batch`"
            )


def not_sums(metrics: Metrics, outputs: np.ndarray, targets: np.ndarray) -> list[str]:
    """A warning for each metric whose value for a batch is not the sum of those for its halves, such as an AUC."""
    half = len(outputs) // 2
    if metrics.sums is None or not metrics.names or half == 0 or not np.isfinite(outputs).all():
        return []
    try:
        rows = [np.array(metrics.of_batch(outputs[part], targets[part])) for part in _halves(half)]
    except Exception:  # for half a batch; for a whole one there was none
        return []
    bound = _ADDED * abs(rows[0]).max(axis=1, keepdims=True)
    wrong = (abs(rows[1] + rows[2] - rows[0]) > bound).any(axis=1)
    return [
        f"metrics: {name} of a batch is not the sum of its values for two halves, so the result depends on batch_size; "
        "return the sum over samples, or a pair (sum, count)"
        for name, differs in zip(metrics.names, wrong, strict=True)
        if differs
    ]


def _halves(half: int) -> list[slice]:
    return [slice(0, 2 * half), slice(0, half), slice(half, 2 * half)]
