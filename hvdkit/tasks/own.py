"""A task of the user's own: their model with its data, loss and metrics (docs/own-model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdkit.errors import RequestError
from hvdkit.recipe.schema import OwnData, OwnModel, Recipe
from hvdkit.tasks.image_classification import METRICS
from hvdkit.tasks.task import Layer, Metrics

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.data import Shard
    from hvdkit.data.dataset import Dataset, Split


class Own:
    """Subclass it, and define `model`, for data of your own `samples`, and what is not as in a classifier.

    `recipe` is the recipe, `options` what it has under `model.options`, and `dtype` the name of the parameters' dtype,
    which PyTorch and MXNet models need not regard.
    """

    unit = "samples"
    metrics: Metrics = METRICS
    best = "accuracy"  # the metric of which the best checkpoint has the highest, with a minus sign the lowest
    loss: Callable[[Any, Any], Any] | None = None  # (outputs, targets) -> mean loss; None: the recipe's cross-entropy

    def __init__(self, recipe: Recipe) -> None:
        if not isinstance(recipe.model, OwnModel):
            raise RequestError(f"model.name: expected own for a script of your own, got {recipe.model.name}")
        self.recipe, self.options, self.dtype = recipe, recipe.model.options, "float32"

    def model(self) -> Any:
        """The model, in the framework's own way. Its initial weights are those of rank 0."""
        raise NotImplementedError

    def samples(self) -> tuple[Split, Split]:
        """The training and the validation split for `data: {name: own}`, such as `ArraySplit(inputs, targets)`."""
        raise NotImplementedError

    # For hvdkit

    def open_data(self, shard: Shard) -> Dataset:
        """The data set of `samples`, or the recipe's."""
        from hvdkit.data.batches import open_dataset
        from hvdkit.data.dataset import Dataset

        recipe = self.recipe
        if not isinstance(recipe.data, OwnData):
            return open_dataset(recipe.data, recipe.model.classes, recipe.seed, shard, recipe.batch_size)
        train, val = self.samples()
        return Dataset(train, val, (), recipe.model.classes)

    def architecture(self, shape: tuple[int, ...] | None = None) -> OwnArchitecture:
        """The architecture: only the script knows its parameters."""
        return OwnArchitecture(self)

    def check(self, shape: tuple[int, ...]) -> None:
        """Nothing is known that could be checked."""

    @staticmethod
    def build(architecture: OwnArchitecture) -> Any:
        """The model of a table from `architecture`."""
        architecture.task.dtype = architecture.dtype
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
