"""How many samples a data set has and how they look, as far as that is known before ranks start.

The commands check requests by it. NumPy is loaded only for data sets whose files have to be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from hvdkit.errors import LARGEST, RequestError

if TYPE_CHECKING:  # predictions read the table and start without the recipe's schema
    from hvdkit.recipe.schema import AnyData, Cifar10, ImageFolder


@dataclass(frozen=True)
class Counts:
    """Samples of the two splits, the shape of one (height, width, channels), and the number of classes; `left_out` has
    lines about what is on disk and not among them."""

    train: int
    val: int
    shape: tuple[int, ...]
    classes: int
    left_out: tuple[str, ...] = field(default=(), compare=False)


KNOWN = {
    "digits": Counts(1437, 360, (32, 32, 3), 10),
    "mnist5k": Counts(4000, 1000, (32, 32, 3), 10),
    "cifar10": Counts(50_000, 10_000, (32, 32, 3), 10),
}


def count(data: AnyData, classes: int) -> Counts | None:
    """The counts of a data set on this machine; None if only a rank can know them. Synthetic data have all `classes`.

    Raises RequestError if its files are missing or wrong.
    """
    if data.name == "synthetic":
        return Counts(data.train_images, data.val_images, (data.height, data.width, data.channels), classes)
    if data.name == "cifar10" or data.name == "imagefolder":
        return _opened(data)
    if data.name == "native":
        from hvdkit.data.user_pipeline import check_module

        check_module(data)
    return KNOWN.get(data.name)


@lru_cache(maxsize=1)  # the runs of a comparison have the same data
def _opened(data: Cifar10 | ImageFolder) -> Counts:
    from hvdkit.data.batches import open_dataset

    if data.name == "imagefolder":  # nothing is read ahead here
        data = data.model_copy(update={"workers": 0})
    opened = open_dataset(data, LARGEST, seed=0)
    return Counts(len(opened.train), len(opened.val), opened.shape, opened.classes, opened.left_out)


def check_validation(samples: int) -> None:
    """Raise RequestError if there is nothing to evaluate on."""
    if samples == 0:
        raise RequestError("data: expected validation samples, got none")
