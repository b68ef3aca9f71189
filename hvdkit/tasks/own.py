"""A task of the user's own: their model with its data, loss and metrics (docs/own-model.md)."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit.errors import RequestError
from hvdkit.files import read_bounded
from hvdkit.recipe.schema import Loss, OwnData, OwnModel, Recipe
from hvdkit.tasks.image_classification import ACCURACY, METRICS, metrics_with
from hvdkit.tasks.task import NO_METRICS, Architecture, Metrics, Task

if TYPE_CHECKING:
    from hvdkit.data import Shard
    from hvdkit.data.dataset import Dataset, Split


class Own(Task):
    """Subclass it, and define `model`, for data of your own `samples`, and what is not as in a classifier.

    `recipe` is the recipe, `options` what it has under `model.options`. `dtype` is the name of the parameters' dtype,
    `compute_dtype` that of the activations; PyTorch and MXNet models are cast, and need not regard them.
    """

    own = True
    metrics: Metrics = METRICS
    best = ""  # accuracy if it is measured, else the lowest loss

    def __init__(self, recipe: Recipe) -> None:
        if not isinstance(recipe.model, OwnModel):
            raise RequestError(f"model.name: expected own for a script of your own, got {recipe.model.name}")
        self._check_metrics()
        if self.loss is not None and recipe.loss != Loss():
            raise RequestError(f"loss: expected none in the recipe, as {type(self).__name__} has a loss of its own")
        if self.metrics is METRICS:
            self.metrics = metrics_with(recipe.loss)
        super().__init__(recipe)
        self.options = recipe.model.options
        self.dtype = self.compute_dtype = "float32"

    def _check_metrics(self) -> None:
        name, metrics = type(self).__name__, self.metrics
        if not (isinstance(metrics, Metrics) and isinstance(metrics.names, tuple) and callable(metrics.sums)):
            expected = 'Metrics(("name",), function), with a tuple of names and a function (outputs, targets) -> sums'
            raise RequestError(f"{name}.metrics: expected {expected}, got {metrics!r:.80}")
        names = [*metrics.names, *(["loss"] if self.loss is not None and "loss" not in metrics.names else [])]
        self.best = self.best or ("accuracy" if "accuracy" in names else "-loss")
        if self.best.removeprefix("-") not in names:
            known = ", ".join(names)
            got = f"got {self.best!r}" if type(self).best else "none is set"
            raise RequestError(
                f"{name}.best: expected the metric of the best checkpoint, one of {known}, with a minus sign where the "
                f'lowest is the best, such as best = "-{names[0]}"; {got}'
            )

    def model(self) -> Any:
        """The model, in the framework's own way. Its initial weights are those of rank 0."""
        raise RequestError(f"{type(self).__name__}: expected a method `model` that returns the model, got none")

    def samples(self) -> tuple[Split, Split]:
        """The training and the validation split for `data: {name: own}`, such as `ArraySplit(inputs, targets)`."""
        expected = "expected a method `samples` that returns two splits for `data: {name: own}`"
        raise RequestError(f"{type(self).__name__}: {expected}, got none")

    def blocks(self, model: Any) -> Sequence[Any] | None:
        """For `parallel.pipeline`: the parts of the model that are called one after the other; None if it has no method
        `blocks` that says so."""
        own = getattr(model, "blocks", None)
        return own() if inspect.ismethod(own) else None

    def handlers(self) -> Sequence[object]:
        """Objects of `hvdkit.Handler`, called around the steps of training; as many on all ranks."""
        return ()

    # For hvdkit

    def open_data(self, shard: Shard) -> Dataset:
        """The data set of `samples`, or the recipe's."""
        from hvdkit.data.dataset import Dataset

        if not isinstance(self.recipe.data, OwnData):
            return super().open_data(shard)
        splits = self.samples()
        if not (isinstance(splits, tuple | list) and len(splits) == 2 and all(map(_is_split, splits))):
            raise RequestError(
                f"{type(self).__name__}.samples: expected two splits, training and validation, such as "
                f"`return ArraySplit(x[100:], y[100:]), ArraySplit(x[:100], y[:100])`, got {_brief(splits)}"
            )
        train, val = (_given(split, labels=self.loss is None) for split in splits)
        if self.loss is not None and self.metrics is METRICS:  # whose loss is another one
            self.metrics = ACCURACY if _has_labels(train) else NO_METRICS
            self.best = self.best if "accuracy" in self.metrics.names else "-loss"
        return Dataset(train, val, (), int(self.recipe.model.classes))

    def architecture(self, shape: tuple[int, ...] | None = None) -> OwnArchitecture:
        """The architecture: only the script knows its parameters."""
        return OwnArchitecture(self)

    @staticmethod
    def build(architecture: OwnArchitecture) -> Any:
        """The model of a table from `architecture`. Raises RequestError if `model` returns none."""
        architecture.task.dtype, architecture.task.compute_dtype = architecture.dtype, architecture.compute_dtype
        model = architecture.task.model()
        if model is None or isinstance(model, type):
            got = "nothing; is `return` missing?" if model is None else f"the class {model.__name__}; call it"
            raise RequestError(
                f"{type(architecture.task).__name__}.model: expected that it returns the model, got {got}"
            )
        return model


def script_sha256(recipe: Recipe) -> str | None:
    """The SHA-256 of the file of `model.script`; None without one, or if it cannot be read now."""
    if not isinstance(recipe.model, OwnModel):
        return None
    try:
        return hashlib.sha256(read_bounded(Path(recipe.model.script).expanduser())).hexdigest()
    except OSError:
        return None


def _is_split(split: Any) -> bool:
    return hasattr(split, "batch") and hasattr(split, "__len__")


def _given(split: Any, labels: bool) -> Any:
    """A split of the user's, whose batches are a `Batch`; with `labels`, bool ones are 0 and 1."""
    from hvdkit.data.dataset import ArraySplit, BatchedSplit, GivenSplit, StreamedSplit

    if isinstance(split, ArraySplit) and labels and split.targets.dtype == bool:
        return ArraySplit(split.inputs, split.targets.astype("int64"))
    return split if isinstance(split, ArraySplit | BatchedSplit | StreamedSplit) else GivenSplit(split, labels)


def _has_labels(split: Split) -> bool:
    """Whether the targets are labels, one whole number for each sample."""
    import numpy as np

    targets = split.batch(np.arange(1)).targets if len(split) else np.zeros(1)
    return targets.ndim == 1 and bool(np.issubdtype(targets.dtype, np.integer))


def _brief(value: Any) -> str:
    """What `samples` has returned, in a few words."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of " + (", ".join(type(item).__name__ for item in value[:6]) or "nothing")
    return "None" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True)
class OwnArchitecture(Architecture):
    """An architecture without a table: it is built, and its weights are initialized, by the user's code."""

    task: Own


TASK = Own
