"""A task of the user's own on one batch, before training: its faults would else show after the first epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdkit.core.session import Session
from hvdkit.core.trainer import checked_sums
from hvdkit.data.dataset import ArraySplit, BatchedSplit, Dataset, Split, arguments
from hvdkit.errors import RequestError
from hvdkit.tasks.image_classification import METRICS
from hvdkit.tasks.task import Task

_TOLERANCE = 1e-5  # relative, for sums of the same float32 values in another order


def sanity_check(session: Session, task: Task, dataset: Dataset, batch_size: int) -> list[str]:
    """Call the model in evaluation mode, the metrics and the task's loss on one batch; no collective.

    Returns a warning for the loss, and for the metrics, if outputs and targets are broadcast against each other. Raises
    RequestError for outputs that are not one for each sample; what the user's code raises has a note that says where.
    """
    split = dataset.val if len(dataset.val) else dataset.train
    if isinstance(split, BatchedSplit) or not len(split):
        return []
    batch = split.batch(np.arange(batch_size) % len(split))
    targets = np.asarray(batch.targets)
    inputs = ", ".join(str(np.shape(each)) for each in arguments(batch.inputs))
    outputs = _called("model", f"inputs of shape {inputs}", lambda: session.predict(batch.inputs))
    if outputs.shape[:1] != (batch_size,):
        raise RequestError(
            f"model: expected an output for each sample, of shape ({batch_size}, …), for inputs of shape {inputs}; got "
            f"the shape {outputs.shape}"
        )
    if task.metrics is METRICS:
        _check_labels(outputs, [each for each in (dataset.train, dataset.val) if isinstance(each, ArraySplit)])
    shapes = f"outputs of shape {outputs.shape} and targets of shape {targets.shape}"
    _called("metrics", shapes, lambda: checked_sums(task.metrics, outputs, targets))
    warnings = [*_not_finite("training", dataset.train), *_not_finite("validation", dataset.val)]
    if session.own_loss is None:
        return warnings
    _called("loss", shapes, lambda: session.mean_loss(outputs, targets))
    remedy = f"give the targets the outputs' shape: targets[:, {0 if outputs.ndim == 1 else None}]"
    return warnings + [
        f"{name}: {shapes} are broadcast to ({batch_size}, {batch_size}), so each output is compared with each target; "
        f"{remedy}"
        for name, function in (
            ("loss", session.mean_loss),
            ("metrics", lambda outputs, targets: checked_sums(task.metrics, outputs, targets)),
        )
        if _broadcasts(function, outputs, targets)
    ]


def _check_labels(outputs: np.ndarray, splits: list[ArraySplit]) -> None:
    """Check that targets are what the recipe's cross-entropy, and accuracy, need. Raises RequestError."""
    for split in filter(len, splits):
        targets = split.targets
        got = None
        if outputs.ndim != 2 or targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
            got = f"{targets.dtype} of shape {targets.shape} for outputs of shape {outputs.shape}"
        elif targets.min() < 0 or targets.max() >= outputs.shape[1]:
            got = f"{targets.min()} to {targets.max()}"
        if got:
            raise RequestError(
                f"targets: expected labels for cross-entropy, whole numbers of shape (n,) from 0 to "
                f"{outputs.shape[-1] - 1} (the model has {outputs.shape[-1]} outputs), got {got}; for other targets "
                "give a loss of your own"
            )


def _not_finite(name: str, split: Split) -> list[str]:
    """A warning for each array of a split in memory that has NaN or infinity."""
    if not isinstance(split, ArraySplit) or not len(split):
        return []
    arrays = [("inputs", each) for each in arguments(split.inputs)] + [("targets", split.targets)]
    floating = [(what, each) for what, each in arrays if each.size and np.issubdtype(each.dtype, np.floating)]
    return [
        f"samples: the {name} {what} have NaN or infinity"
        for what, each in floating
        if not isinstance(each, np.memmap) and not np.isfinite([each.min(), each.max()]).all()  # makes no copy
    ]


def _called(name: str, on: str, function: Callable[[], np.ndarray | float]) -> np.ndarray:
    try:
        return np.asarray(function())
    except Exception as error:
        error.add_note(f"in the {name}, with {on}")
        raise


def _broadcasts(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray | float], outputs: np.ndarray, targets: np.ndarray
) -> bool:
    """Whether a function of (n, 1) and (n,), or the other way round, stays the same if the targets change places.

    A mean over all pairs does. The outputs are random ones, as those of a new model may all be the same.
    """
    turned = np.roll(targets, 1, axis=0)
    if {outputs.shape, targets.shape} != {(len(targets),), (len(targets), 1)} or np.array_equal(turned, targets):
        return False
    drawn = np.random.default_rng(0).uniform(0.1, 0.9, outputs.shape).astype(outputs.dtype)
    try:
        straight, crossed = (np.asarray(function(drawn, each)) for each in (targets, turned))
    except Exception:  # for these outputs; for the model's own there was none
        return False
    return straight.size > 0 and bool(np.allclose(straight, crossed, rtol=_TOLERANCE, atol=0))
