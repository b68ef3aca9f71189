"""Image classification: a ResNet, images with one label each, softmax cross-entropy and accuracy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, Model, Recipe
from hvdkit.tasks import resnet
from hvdkit.tasks.task import Metrics, Task

if TYPE_CHECKING:
    import numpy as np


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Softmax cross-entropy of each row in float64: (…, classes), (…) -> (rows,)."""
    import numpy as np

    logits, labels = logits.reshape(-1, logits.shape[-1]).astype(np.float64), labels.reshape(-1)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels])


def _sums(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    correct = (logits.argmax(axis=1) == labels).sum()
    return float(correct), float(cross_entropy(logits, labels).sum())


# Accuracy as a fraction of 1, and cross-entropy without label smoothing, of logits (n, classes) and labels (n,).
METRICS = Metrics(("accuracy", "loss"), _sums)


def metrics_with(loss: Loss) -> Metrics:
    """METRICS, for a recipe's loss: over the targets that it does not ignore."""
    return METRICS if loss.ignored_label is None else replace(METRICS, ignored=loss.ignored_label)


ACCURACY = Metrics(("accuracy",), lambda logits, labels: (float((logits.argmax(axis=1) == labels).sum()),))


class ImageClassification(Task):
    """The task of recipes whose model is a ResNet. Samples are (height, width, channels), targets labels (n,)."""

    unit = "images"
    best = "accuracy"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert isinstance(recipe.model, Model)
        self._model, self.metrics = recipe.model, metrics_with(recipe.loss)

    def architecture(self, shape: tuple[int, ...] | None = None) -> resnet.ResNet:
        """The recipe's ResNet, for images of `shape`; None for those with three channels."""
        model = self._model
        table = resnet.architecture(model.name, int(model.classes), shape[2] if shape else 3)
        return replace(table, zero_init_residual=model.zero_init_residual)

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that each batch norm has more than one value per channel, as one has no variance."""
        height, width, _ = shape
        architecture = self.architecture(shape)
        if self.recipe.batch_size == 1 and architecture.last_map(height, width) == (1, 1):
            raise RequestError(
                f"batch_size: {architecture.name} reduces images of {height}×{width} pixels to 1×1, and one value per "
                "channel has no variance for batch norm; expected batch_size 2 or more, or larger images"
            )


TASK = ImageClassification
