"""How many samples a data set has and how they look, as far as that is known before ranks start.

The commands check requests by it. NumPy is loaded only for data sets whose files have to be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hvdkit.errors import LARGEST, RequestError
from hvdkit.recipe.schema import AnyData, Cifar10, ImageFolder, Native, Synthetic


@dataclass(frozen=True)
class Counts:
    """Samples of the two splits, the shape of one (height, width, channels), and the number of classes."""

    train: int
    val: int
    shape: tuple[int, ...]
    classes: int


KNOWN = {
    "digits": Counts(1437, 360, (32, 32, 3), 10),
    "mnist5k": Counts(4000, 1000, (32, 32, 3), 10),
    "cifar10": Counts(50_000, 10_000, (32, 32, 3), 10),
}


def count(data: AnyData, classes: int) -> Counts | None:
    """The counts of a data set on this machine; None if only a rank can know them. Synthetic data have all `classes`.

    Raises RequestError if its files are missing or wrong.
    """
    if isinstance(data, Synthetic):
        return Counts(data.train_images, data.val_images, (data.height, data.width, data.channels), classes)
    if isinstance(data, Cifar10 | ImageFolder):
        return _opened(data)
    if isinstance(data, Native):
        from hvdkit.data.user_pipeline import check_module

        check_module(data)
    return KNOWN.get(data.name)


@lru_cache(maxsize=1)  # the runs of a comparison have the same data
def _opened(data: Cifar10 | ImageFolder) -> Counts:
    from hvdkit.data.batches import open_dataset

    if isinstance(data, ImageFolder):  # nothing is read ahead here
        data = data.model_copy(update={"workers": 0})
    opened = open_dataset(data, LARGEST, seed=0)
    return Counts(len(opened.train), len(opened.val), opened.shape, opened.classes)


def check_validation(samples: int) -> None:
    """Raise RequestError if there is nothing to evaluate on."""
    if samples == 0:
        raise RequestError("data: expected validation samples, got none")
