"""Pictures that belong to no data set, prepared as a data set's images are for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdkit.data import imagefolder, pixels
from hvdkit.data.dataset import Batch, Dataset, Preprocessing
from hvdkit.data.small_images import PREPROCESSING
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AnyData, ImageFolder

_MNIST_BORDER = 2  # around the 28×28 pixels of a digit


@dataclass(frozen=True)
class PictureSplit:
    """Files with pictures, without labels. A batch raises RequestError for one that cannot be read."""

    files: Sequence[str]
    data: AnyData
    how: Preprocessing

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: np.ndarray) -> Batch:
        """The pictures at `indices` (n,), in that order; all labels are 0."""
        prepared: dict[int, np.ndarray] = {}
        for index in indices.tolist():  # a short batch repeats its first picture
            if index not in prepared:
                prepared[index] = self._prepared(self.files[index])
        return Batch(np.stack([prepared[index] for index in indices.tolist()]), np.zeros(len(indices), np.int64))

    def _prepared(self, file: str) -> np.ndarray:
        """A picture as evaluation sees it, (size, size, 3) float32."""
        data, size, how = self.data, self.how.size, self.how
        try:
            image = imagefolder.read(data, file) if isinstance(data, ImageFolder) else pixels.read(file, upright=True)
        except pixels.CorruptImage as error:
            raise RequestError(f"{file}: {error}; expected a JPEG or PNG image") from None
        if isinstance(data, ImageFolder):
            return pixels.for_evaluation(image, size, int(data.resize), how.mean, how.std)
        if data.name != "cifar10":  # digits are grey
            image = image.convert("L").convert("RGB")
        border = _MNIST_BORDER if data.name == "mnist5k" else 0
        inner = pixels.centre(image, size - 2 * border, size - 2 * border)
        return pixels.normalised(np.pad(inner, ((border, border), (border, border), (0, 0))), how.mean, how.std)


def open_pictures(files: Sequence[str], data: AnyData, how: Preprocessing) -> Dataset:
    """The pictures as a validation split."""
    split = PictureSplit(files, data, how)
    return Dataset(split, split, (how.size, how.size, how.channels), len(how.class_names), preprocessing=how)


def preprocessing(data: AnyData, classes: int, kept: Preprocessing | None) -> Preprocessing:
    """How a checkpoint's model sees pictures: as the `kept` one says or, of an earlier hvdkit, by the recipe's data,
    with numbers as the names of classes that it does not name.

    Raises RequestError if the data are no pictures.
    """
    if kept is None and isinstance(data, ImageFolder):
        kept = Preprocessing((), int(data.size), pixels.MEAN, pixels.DEVIATION, resize=int(data.resize))
    kept = kept or PREPROCESSING.get(data.name)
    if kept is None:
        raise RequestError(
            f"data.name: the checkpoint was trained on {data.name!r}, for which no picture can be prepared; expected "
            f"imagefolder, {', '.join(PREPROCESSING)}"
        )
    names = (*kept.class_names, *map(str, range(len(kept.class_names), classes)))
    return replace(kept, class_names=names)
