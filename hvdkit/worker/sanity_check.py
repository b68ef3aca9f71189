"""A task of the user's own on one batch, before training: its faults would else show after the first epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from hvdkit.core.loop import Handler
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.core.tensors import Tensor
from hvdkit.data.dataset import ArraySplit, Batch, BatchedSplit, Dataset, Split, arguments, mapped, own_share
from hvdkit.errors import RequestError
from hvdkit.tasks.image_classification import METRICS
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Task
from hvdkit.worker.setup import Setup, check_alike

T = TypeVar("T")
Measure = Callable[[np.ndarray, np.ndarray], Any]  # of outputs and targets: a loss, or metrics
_ADDED = 1e-4  # relative, for sums of the same float32 values in another order
# Of the largest output. Kernels round by a sample's place in the batch; activations of 16 bits have 8 or 11 digits.
_TOLERANCE, _TOLERANCE_16_BITS = {"float64": 1e-6, "float32": 1e-3}, 5e-2


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

    With gradients or parameters that are sharded there is no such step, as it would need them all at once, nor in a
    pipeline, over whose ranks it is collective.

    `seen` gets the model's outputs. Returns warnings for what can hardly be meant. Raises RequestError for outputs that
    are not one for each sample; what the user's code raises has a note that says where.
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
        arrays = [own.targets for own in (dataset.train, dataset.val) if isinstance(own, ArraySplit)]
        _check_labels(outputs, arrays or [targets], task.metrics.sums is METRICS.sums, task.metrics.ignored)
    shapes = f"outputs of shape {outputs.shape} and targets of shape {targets.shape}"
    _called("metrics", shapes, lambda: task.metrics.of_batch(outputs, targets))
    warnings = [*_not_finite("training", dataset.train), *_not_finite("validation", dataset.val)]
    measures: dict[str, Measure] = {}
    if session.custom_loss is not None:
        _, count = _called("loss", shapes, lambda: session.loss_of(outputs, targets))
        if count is not None and not (np.isfinite(count) and count >= 0):
            raise RequestError(f"loss: expected a count of 0 or more in (sum, count), got {count:.6g}")
        measures = {"loss": session.mean_loss, "metrics": task.metrics.of_batch}
    broadcast = [name for name, measure in measures.items() if _broadcasts(measure, outputs, targets)]
    warnings += [
        f"{name}: {shapes} are broadcast to ({len(targets)}, {len(targets)}), so each output is compared with each "
        f"target; give the targets the outputs' shape: targets[:, {0 if outputs.ndim == 1 else None}]"
        for name in broadcast
    ]
    if not broadcast:
        warnings += _loss_not_added(session, outputs, targets) if measures else []
        warnings += _metrics_not_added(task, outputs, targets)
    warnings += _called("model", inputs, lambda: _of_model(session, PRECISIONS[precision].compute, batch, outputs))
    if session.adapter.rival is None and not session.strategy.keeps_shares and not session.pipeline:
        first, inputs = _first_batch(dataset.train, batch_size)
        on = f"{inputs} and targets of shape {first.targets.shape}, {first.targets.dtype}"
        with _uncounted(task):
            _called("first training step", on, lambda: rehearse(session, first))
    return warnings


def handlers_of(setup: Setup) -> list[Handler]:
    """The task's handlers; collective. Raises RequestError for what is no handler, and if ranks have others."""
    task = setup.task
    if not isinstance(task, Own):
        return []
    given, expected = task.handlers(), "expected a list of objects of hvdkit.Handler"
    if not isinstance(given, list | tuple):
        raise RequestError(f"{type(task).__name__}.handlers: {expected}, got a {type(given).__name__}")
    for handler in given:
        if not isinstance(handler, Handler):
            is_class = isinstance(handler, type)
            got = f"the class {handler.__name__}; call it" if is_class else f"a {type(handler).__name__}"
            raise RequestError(f"{type(task).__name__}.handlers: {expected}, got in it {got}")
    check_alike(setup.adapter, setup.mesh.world, {"handlers": [type(handler).__name__ for handler in given]})
    return list(given)


def rehearse(session: Session, batch: Batch) -> None:
    """Compute a batch's loss and gradients as a training step does, and change nothing; no collective.

    Raises RequestError naming a gradient that is not finite although the loss is.
    """
    adapter = session.adapter
    drawn = np.random.get_state(), random.getstate()  # a model or a loss may draw from them
    buffers, states = session.buffers(), adapter.random_states()

    def rehearsed(inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        _, loss, gradients = session.trainable.backward(inputs, targets, session.step.scale)
        return loss, gradients

    try:
        with session.trainable.unchanged():
            loss, gradients = session.compiled(rehearsed)(*session.step.to_device(batch))
            if session.step.scale is None and np.isfinite(adapter.to_numpy(loss)).all():
                for name, gradient in gradients.items():
                    if not np.isfinite(adapter.to_numpy(adapter.norm(gradient))).all():
                        raise RequestError(
                            f"model: the gradient of {name} is not finite although the loss is; look for what has no "
                            "derivative at 0, such as a square root or a norm, in the model or the loss"
                        )
    finally:
        np.random.set_state(drawn[0])
        random.setstate(drawn[1])
        session.load_buffers(buffers)
        adapter.load_random_states(states)


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
    inputs = arguments(batch.inputs)
    shapes = [array.shape for array in (*inputs, batch.targets)]
    if any(shape[:1] != (batch_size,) for shape in shapes):
        raise RequestError(
            f"samples: expected a batch of {batch_size} samples, with a row for each in inputs and targets, got inputs "
            f"of shape {', '.join(map(str, shapes[:-1]))} and targets of shape {shapes[-1]}"
        )
    return batch, "inputs of shape " + ", ".join(f"{array.shape}, {array.dtype}" for array in inputs)


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
    return [
        f"samples: the {name} {what} have NaN or infinity"
        for what, array in [*(("inputs", array) for array in arguments(split.inputs)), ("targets", split.targets)]
        if array.size and np.issubdtype(array.dtype, np.floating) and not isinstance(array, np.memmap)
        if not np.isfinite([array.min(), array.max()]).all()  # makes no copy
    ]


def _called(name: str, on: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception as error:
        error.add_note(f"in the {name}, with {on}")
        raise


def _broadcasts(measure: Measure, outputs: np.ndarray, targets: np.ndarray) -> bool:
    """Whether a function of (n, 1) and (n,), or the other way round, stays the same if the targets change places.

    A mean over all pairs does. The outputs are random ones, as those of a new model may all be the same.
    """
    turned = np.roll(targets, 1, axis=0)
    if {outputs.shape, targets.shape} != {(len(targets),), (len(targets), 1)} or np.array_equal(turned, targets):
        return False
    drawn = np.random.default_rng(0).uniform(0.1, 0.9, outputs.shape).astype(outputs.dtype)
    try:
        straight, crossed = (np.asarray(measure(drawn, given)) for given in (targets, turned))
    except Exception:  # for these outputs; for the model's own there was none
        return False
    return straight.size > 0 and bool(np.allclose(straight, crossed, rtol=_ADDED / 10, atol=0))


def _of_halves(measure: Measure, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray | None:
    """What is measured of a batch, of its first half and of its second one; None if that is not possible."""
    half = len(targets) // 2
    try:
        parts = [slice(0, 2 * half), slice(0, half), slice(half, 2 * half)]
        return np.array([measure(outputs[part], targets[part]) for part in parts], np.float64) if half else None
    except Exception:  # for half a batch; for all of it there was none
        return None


def _added(rows: np.ndarray, share: float = 1.0) -> np.ndarray:
    """Whether the first row is this share of the sum of the two others, element by element."""
    bound = _ADDED * np.nan_to_num(np.abs(rows)).max(axis=0, initial=0.0)
    close: np.ndarray = np.isclose(rows[0], share * (rows[1] + rows[2]), rtol=0, atol=bound, equal_nan=True)
    return close


def _loss_not_added(session: Session, outputs: np.ndarray, targets: np.ndarray) -> list[str]:
    """A warning if the loss of a batch is not the mean of those of its halves, or its sum and count not their sums."""
    counts = session.loss_of(outputs, targets)[1] is not None
    rows = _of_halves(lambda y, t: [value or 0.0 for value in session.loss_of(y, t)], outputs, targets)
    if rows is None or _added(rows, 1.0 if counts else 0.5).all():
        return []
    samples = len(targets) // 2 * 2
    if counts:
        pairs = ", ".join(f"({value:.6g}, {count:.6g})" for value, count in rows)
        return [
            f"loss: (sum, count) of {samples} samples is not that of one half plus that of the other: {pairs}; return "
            "the sum over the batch, not its mean"
        ]
    return [
        f"loss: {rows[0, 0]:.6g} for {samples} samples, {rows[1, 0]:.6g} and {rows[2, 0]:.6g} for their halves, of "
        "which it is not the mean, so training depends on batch_size, accumulate and the number of ranks; if it "
        "divides by a count, such as one of tokens or a sum of weights, return (sum, count) in place of the quotient"
    ]


def _metrics_not_added(task: Task, outputs: np.ndarray, targets: np.ndarray) -> list[str]:
    """A warning for each metric whose value for a batch is not the sum of those for its halves, such as an AUC."""
    metrics = task.metrics
    if metrics.sums is None or not metrics.names or not np.isfinite(outputs).all():
        return []
    rows = _of_halves(metrics.of_batch, outputs, targets)
    if rows is None:
        return []
    return [
        f"metrics: {name} of a batch is not the sum of its values for two halves, so the result depends on batch_size; "
        "return the sum over samples, or a pair (sum, count)"
        for name, added in zip(metrics.names, _added(rows), strict=True)
        if not added.all()
    ]


def _of_model(session: Session, compute: str, batch: Batch, outputs: np.ndarray) -> list[str]:
    """Warnings about outputs that are probabilities, random, or depend on the other samples of the batch.

    The model is called again in evaluation mode, once or twice. Raises RequestError for a model that changes the
    samples of a split.
    """
    warnings, half = [], len(outputs) // 2
    scores = session.custom_loss is None and outputs.ndim > 1 and outputs.shape[-1] > 1 and outputs.size
    if scores and outputs.min() >= 0 and abs(outputs.sum(axis=-1, dtype=np.float64) - 1).max() <= 1e-3:
        warnings.append(
            "model: its outputs are probabilities (from 0 to 1, with the sum 1), but cross-entropy takes logits and "
            "computes the softmax itself; leave the last softmax out"
        )
    if half == 0 or not np.isfinite(outputs).all():
        return warnings
    before = mapped(np.copy, batch.inputs)
    limit = _TOLERANCE.get(compute, _TOLERANCE_16_BITS) * abs(outputs).max()
    again = session.predict(batch.inputs)
    for array, copy in zip(arguments(batch.inputs), arguments(before), strict=True):
        if array.base is not None and not np.array_equal(array, copy, equal_nan=array.dtype.kind == "f"):
            raise RequestError(
                "model: it changes its inputs in place, and they are a view of the split's own arrays, so that the "
                "samples would change with each use; compute out of place, or return a copy from `batch`"
            )
    others = mapped(lambda array: np.concatenate([array[:half], array[: len(array) - half]]), before)
    if abs(again - outputs).max() > limit:
        warnings.append(
            "model: two calls in evaluation mode give different outputs for the same samples, so validation is random; "
            "switch dropout and other noise off in evaluation (in PyTorch: nn.Dropout, or "
            "functional.dropout(x, training=self.training))"
        )
    elif abs(session.predict(others)[:half] - outputs[:half]).max() > limit:
        warnings.append(
            "model: the outputs for a sample depend on the other samples of its batch in evaluation mode, so "
            "validation depends on batch_size; give batch norm running statistics (track_running_stats)"
        )
    return warnings
