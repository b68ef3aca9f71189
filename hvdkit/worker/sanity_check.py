"""A task of the user's own on one batch, before training: its faults would else show after the first epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hvdkit.core.loop import Handler
from hvdkit.core.session import Session
from hvdkit.data.dataset import ArraySplit, Batch, BatchedSplit, Dataset, Split, arguments, own_share
from hvdkit.errors import RequestError
from hvdkit.tasks.image_classification import METRICS
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Task
from hvdkit.worker.model_doubts import doubts, not_sums
from hvdkit.worker.setup import Setup, check_alike

T = TypeVar("T")
_TOLERANCE = 1e-5  # relative, for sums of the same float32 values in another order


def sanity_check(
    session: Session,
    task: Task,
    dataset: Dataset,
    batch_size: int,
    precision: str = "fp32",
    seen: list[np.ndarray] | None = None,
) -> list[str]:
    """Call the model, the metrics and the task's loss on one batch in evaluation mode, and compute a training step of
    another one without its update. Nothing changes by it; no collective.

    With gradients or parameters that are sharded there is no such step, as it would need them all at once.

    `seen` gets the model's outputs. Returns a warning for the loss, and for the metrics, if outputs and targets are
    broadcast against each other. Raises RequestError for outputs that are not one for each sample; what the user's code
    raises has a note that says where.
    """
    dataset = replace(dataset, train=own_share(dataset.train), val=own_share(dataset.val))
    split = dataset.val if len(dataset.val) else dataset.train
    if isinstance(split, BatchedSplit) or not len(split):
        return []
    batch, inputs = _first_batch(split, batch_size)
    targets = batch.targets
    outputs = _called("model", inputs, lambda: session.predict(batch.inputs))
    if outputs.shape[:1] != (batch_size,):
        raise RequestError(
            f"model: expected an output for each sample, of shape ({batch_size}, …), for {inputs}; got the shape "
            f"{outputs.shape}"
        )
    if seen is not None:
        seen.append(outputs)
    if session.custom_loss is None:
        arrays = [each.targets for each in (dataset.train, dataset.val) if isinstance(each, ArraySplit)]
        _check_labels(outputs, arrays or [targets], task.metrics.sums is METRICS.sums, task.metrics.ignored)
    shapes = f"outputs of shape {outputs.shape} and targets of shape {targets.shape}"
    _called("metrics", shapes, lambda: task.metrics.of_batch(outputs, targets))
    warnings = [*_not_finite("training", dataset.train), *_not_finite("validation", dataset.val)]
    broadcast: list[str] = []
    if session.custom_loss is not None:
        _, count = _called("loss", shapes, lambda: session.loss_of(outputs, targets))
        if count is not None and not (np.isfinite(count) and count >= 0):
            raise RequestError(f"loss: expected a count of 0 or more in (sum, count), got {count:.6g}")
        broadcast = _broadcast(session, task, outputs, targets)
        warnings += broadcast or _not_additive(session, outputs, targets)
    warnings += [] if broadcast else not_sums(task.metrics, outputs, targets)
    warnings += _called("model", inputs, lambda: doubts(session, precision, batch, outputs))
    if session.adapter.rival is None and not session.strategy.keeps_shares:
        first, inputs = _first_batch(dataset.train, batch_size)
        on = f"{inputs} and targets of shape {first.targets.shape}, {first.targets.dtype}"
        with _uncounted(task):
            _called("first training step", on, lambda: session.rehearse(first))
    return warnings


def handlers_of(setup: Setup) -> list[Handler]:
    """The task's handlers; collective. Raises RequestError for what is no handler, and if ranks have others."""
    task = setup.task
    if not isinstance(task, Own):
        return []
    given, expected = task.handlers(), "expected a list of objects of hvdkit.Handler"
    if not isinstance(given, list | tuple):
        raise RequestError(f"{type(task).__name__}.handlers: {expected}, got a {type(given).__name__}")
    for each in given:
        if not isinstance(each, Handler):
            got = f"the class {each.__name__}; call it" if isinstance(each, type) else f"a {type(each).__name__}"
            raise RequestError(f"{type(task).__name__}.handlers: {expected}, got in it {got}")
    check_alike(setup.adapter, setup.mesh.world, {"handlers": [type(each).__name__ for each in given]})
    return list(given)


@contextmanager
def _uncounted(task: Task) -> Iterator[None]:
    """Afterwards the task's own counts are what they were: a loss may follow a schedule by the number of its calls."""
    counts = {name: value for name, value in vars(task).items() if isinstance(value, int | float)}
    try:
        yield
    finally:
        vars(task).update(counts)


def _first_batch(split: Split, batch_size: int) -> tuple[Batch, str]:
    """A batch of a split's first samples, and its inputs in words. Raises RequestError for another number of them."""
    batch = split.batch(np.arange(batch_size) % len(split))
    arrays = [*arguments(batch.inputs), batch.targets]
    shapes = [each.shape for each in arrays]
    if any(shape[:1] != (batch_size,) for shape in shapes):
        raise RequestError(
            f"samples: expected a batch of {batch_size} samples, with a row for each in inputs and targets, got inputs "
            f"of shape {', '.join(map(str, shapes[:-1]))} and targets of shape {shapes[-1]}"
        )
    return batch, "inputs of shape " + ", ".join(f"{each.shape}, {each.dtype}" for each in arrays[:-1])


def _broadcast(session: Session, task: Task, outputs: np.ndarray, targets: np.ndarray) -> list[str]:
    """A warning each for the loss and the metrics if they compare each output with each target."""
    shapes = f"outputs of shape {outputs.shape} and targets of shape {targets.shape}"
    remedy = f"give the targets the outputs' shape: targets[:, {0 if outputs.ndim == 1 else None}]"
    return [
        f"{name}: {shapes} are broadcast to ({len(targets)}, {len(targets)}), so each output is compared with each "
        f"target; {remedy}"
        for name, function in (
            ("loss", session.mean_loss),
            ("metrics", lambda outputs, targets: task.metrics.of_batch(outputs, targets)),
        )
        if _broadcasts(function, outputs, targets)
    ]


def _check_labels(outputs: np.ndarray, all_targets: list[np.ndarray], of_classifier: bool, ignored: int | None) -> None:
    """Raise RequestError unless targets are what the recipe's cross-entropy needs, and accuracy for a classifier.

    Where a label is `ignored`, a classifier may have several targets for each sample.
    """
    shape, besides = ("(n,)", "") if ignored is None else ("(n, …)", f", or {ignored}, loss.ignored_label,")
    for targets in filter(len, all_targets):
        got = None
        shaped = targets.shape[1:] == outputs.shape[1:-1] and outputs.ndim == targets.ndim + 1
        shaped = shaped and not (of_classifier and ignored is None and targets.ndim > 1)
        labels = targets[targets != ignored] if ignored is not None else targets
        if not shaped or targets.dtype.kind not in "iu":
            got = f"{targets.dtype} of shape {targets.shape} for outputs of shape {outputs.shape}"
            whole = targets.dtype.kind == "f" and np.equal(targets, np.round(targets)).all()
            got += "; if they are labels, give targets.astype('int64')" if shaped and whole else ""
        elif of_classifier and labels.size and (labels.min() < 0 or labels.max() >= outputs.shape[-1]):
            got = f"{labels.min()} to {labels.max()}"
        if got:
            raise RequestError(
                f"targets: expected labels for cross-entropy, whole numbers of shape {shape} from 0 to "
                f"{outputs.shape[-1] - 1}{besides} (the model has {outputs.shape[-1]} outputs), got {got}; for other "
                "targets give a loss of your own"
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


def _not_additive(session: Session, outputs: np.ndarray, targets: np.ndarray) -> list[str]:
    """A warning if the loss of a batch is not the mean of those of its halves, or its sum and count not their sums."""
    half = len(targets) // 2
    parts = [slice(0, 2 * half), slice(0, half), slice(half, 2 * half)] if half else []
    try:
        of = [session.loss_of(outputs[part], targets[part]) for part in parts]
    except Exception:  # for half a batch; for a whole one there was none
        return []
    count = of[0][1] if of else None
    rows = np.array([(value, 0.0 if count is None else count) for value, count in of]).reshape(-1, 2)
    halves = rows[1:].sum(axis=0) * (0.5 if count is None else 1.0)
    bound = _TOLERANCE * np.nan_to_num(np.abs(rows)).max(axis=0, initial=0.0)
    if not half or np.isclose(rows[0], halves, rtol=0, atol=bound, equal_nan=True).all():
        return []
    if count is not None:
        pairs = ", ".join(f"({value:.6g}, {count:.6g})" for value, count in rows)
        return [
            f"loss: (sum, count) of {2 * half} samples is not that of one half plus that of the other: {pairs}; return "
            "the sum over the batch, not its mean"
        ]
    return [
        f"loss: {rows[0, 0]:.6g} for {2 * half} samples, {rows[1, 0]:.6g} and {rows[2, 0]:.6g} for their halves, of "
        "which it is not the mean, so training depends on batch_size, accumulate and the number of ranks; if it "
        "divides by a count, such as one of tokens or a sum of weights, return (sum, count) in place of the quotient"
    ]


def _called(name: str, on: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception as error:
        error.add_note(f"in the {name}, with {on}")
        raise


def _broadcasts(function: Callable[[np.ndarray, np.ndarray], Any], outputs: np.ndarray, targets: np.ndarray) -> bool:
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
