"""A task of the user's own: their model with its data, loss and metrics (docs/own-model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, OwnData, OwnModel, Recipe
from hvdkit.tasks.image_classification import METRICS
from hvdkit.tasks.task import Layer, Metrics

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.data import Shard
    from hvdkit.data.dataset import Dataset, Split


class Own:
    """Subclass it, and define `model`, for data of your own `samples`, and what is not as in a classifier.

    `recipe` is the recipe, `options` what it has under `model.options`. `dtype` is the name of the parameters' dtype,
    `compute_dtype` that of the activations; PyTorch and MXNet models are cast, and need not regard them.
    """

    unit = "samples"
    metrics: Metrics = METRICS
    best = "accuracy"  # the metric of which the best checkpoint has the highest, with a minus sign the lowest
    loss: Callable[[Any, Any], Any] | None = None  # (outputs, targets) -> mean loss; None: the recipe's cross-entropy

    def __init__(self, recipe: Recipe) -> None:
        if not isinstance(recipe.model, OwnModel):
            raise RequestError(f"model.name: expected own for a script of your own, got {recipe.model.name}")
        if self.best.removeprefix("-") not in self.metrics.names:
            known = ", ".join(self.metrics.names)
            raise RequestError(f"{type(self).__name__}.best: expected one of its metrics ({known}), got {self.best!r}")
        if self.loss is not None and recipe.loss != Loss():
            raise RequestError(f"loss: expected none in the recipe, as {type(self).__name__} has a loss of its own")
        self.recipe, self.options = recipe, recipe.model.options
        self.dtype = self.compute_dtype = "float32"

    def model(self) -> Any:
        """The model, in the framework's own way. Its initial weights are those of rank 0."""
        raise RequestError(f"{type(self).__name__}: expected a method `model` that returns the model, got none")

    def samples(self) -> tuple[Split, Split]:
        """The training and the validation split for `data: {name: own}`, such as `ArraySplit(inputs, targets)`."""
        expected = "expected a method `samples` that returns two splits for `data: {name: own}`"
        raise RequestError(f"{type(self).__name__}: {expected}, got none")

    # For hvdkit

    def open_data(self, shard: Shard) -> Dataset:
        """The data set of `samples`, or the recipe's."""
        from hvdkit.data.batches import open_dataset
        from hvdkit.data.dataset import Dataset

        recipe = self.recipe
        if not isinstance(recipe.data, OwnData):
            return open_dataset(recipe.data, int(recipe.model.classes), recipe.seed, shard, recipe.batch_size)
        splits = self.samples()
        if not (isinstance(splits, tuple) and len(splits) == 2 and all(hasattr(each, "batch") for each in splits)):
            name = f"{type(self).__name__}.samples"
            raise RequestError(f"{name}: expected two splits, such as ArraySplit(inputs, targets), got {splits!r:.60}")
        train, val = splits
        return Dataset(train, val, (), int(recipe.model.classes))

    def architecture(self, shape: tuple[int, ...] | None = None) -> OwnArchitecture:
        """The architecture: only the script knows its parameters."""
        return OwnArchitecture(self)

    def check(self, shape: tuple[int, ...]) -> None:
        """Nothing is known that could be checked."""

    @staticmethod
    def build(architecture: OwnArchitecture) -> Any:
        """The model of a table from `architecture`."""
        architecture.task.dtype, architecture.task.compute_dtype = architecture.dtype, architecture.compute_dtype
        return architecture.task.model()


@dataclass(frozen=True)
class OwnArchitecture:
    """An architecture without a table: it is built, and its weights are initialized, by the user's code."""

    task: Own
    dtype: str = "float32"
    compute_dtype: str = "float32"
    recompute: bool = False
    norm_momentum = 0.0

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """None are known."""
        return {}

    def activation_values(self, shape: tuple[int, ...], recompute: bool = False) -> int:
        """None are known."""
        return 0

    def initial_state(self, seed: int) -> dict[str, np.ndarray]:
        """None: the framework initializes the weights, after `seed` has been set."""
        return {}

    def normalized_layers(self) -> Iterator[Layer]:
        """None are known."""
        return iter(())


TASK = Own
