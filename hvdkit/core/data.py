"""Images and labels as NumPy arrays, in an order that depends on (seed, epoch) alone.

Images are float32, NHWC; labels int64. The same bytes reach every framework.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hvdkit.config import Digits, Synthetic
from hvdkit.core.augment import augment
from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Batch:
    """`images` (n, height, width, channels) float32 and `labels` (n,) int64."""

    images: np.ndarray
    labels: np.ndarray


class Split(Protocol):
    """Samples that can be picked by number."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""


@dataclass(frozen=True)
class ArraySplit:
    """A split held in memory: `images` (samples, height, width, channels) float32, `labels` (samples,) int64."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        return Batch(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class PoolSplit:
    """As many samples as asked for, all from a small pool, so that images of any size fit in memory.

    Sample i is the pool's sample i modulo its length.
    """

    pool: ArraySplit
    length: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        return self.pool.batch(indices % len(self.pool))


@dataclass(frozen=True)
class Dataset:
    """A training and a validation split; `shape` is (height, width, channels)."""

    train: Split
    val: Split
    shape: tuple[int, int, int]
    classes: int


def open_dataset(data: Digits | Synthetic, classes: int, seed: int) -> Dataset:
    """The recipe's dataset. Raises RequestError where the model has fewer classes or the files are missing."""
    if isinstance(data, Synthetic):
        return _synthetic(data, classes, seed)
    dataset = _digits()
    if classes < dataset.classes:
        raise RequestError(f"model.classes: expected at least {dataset.classes} for data 'digits', got {classes}")
    return dataset


def epoch_batches(
    split: Split,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int,
    size: int,
    augmentation: str = "none",
    first: int = 0,
) -> Iterator[Batch]:
    """This rank's batches of one epoch. All ranks share one permutation; the incomplete last global batch is left out.

    `first` samples of the permutation have been seen already, by however many ranks.

    Global batch k is the k-th run of batch_size × size samples, rank r's part the r-th batch_size of it: no sample
    is on two ranks, and two ranks of 32 see together what one rank of 64 sees.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(split))
    for step in range(steps_per_epoch(len(split) - first, batch_size, size)):
        start = first + (step * size + rank) * batch_size
        samples = order[start : start + batch_size]
        batch = split.batch(samples)
        yield Batch(augment(batch.images, augmentation, seed, epoch, samples), batch.labels)


def steps_per_epoch(samples: int, batch_size: int, size: int) -> int:
    """Whole global batches in an epoch, each of `batch_size` samples on `size` ranks."""
    return samples // (batch_size * size)


def evaluation_batches(split: Split, batch_size: int, rank: int, size: int) -> Iterator[tuple[Batch, int]]:
    """Every `size`-th sample from `rank` on, so that each is evaluated exactly once over all ranks.

    Yields (batch, valid): a short last batch is filled up by repeating its first sample, as some frameworks compile
    a step for one shape; only the first `valid` rows count.
    """
    mine = np.arange(rank, len(split), size)
    for start in range(0, len(mine), batch_size):
        indices = mine[start : start + batch_size]
        filler = np.full(batch_size - len(indices), indices[0])
        yield split.batch(np.concatenate([indices, filler])), len(indices)


def _digits() -> Dataset:
    images, labels = _read_digits()
    # One fixed stratified split, whatever the recipe's seed: shuffled, sorted by class, then every fifth held out.
    order = np.random.default_rng(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[order[::5]] = True
    pixels = _upscale(images)
    # Mean and deviation of the training pixels, as constants so that no summation order can change a bit.
    pixels = (pixels / np.float32(16.0) - np.float32(0.305)) / np.float32(0.324)
    pixels = np.repeat(pixels[..., None], 3, axis=-1)
    train = ArraySplit(pixels[~held_out], labels[~held_out])
    return Dataset(train, ArraySplit(pixels[held_out], labels[held_out]), (32, 32, 3), 10)


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8) float32 of whole numbers 0..16 and (1797,) labels, from the file in scikit-learn's package.

    The package itself is not imported: it would add a second to the start of every rank.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            with gzip.open(path, "rt") as file:
                table = np.loadtxt(file, delimiter=",", dtype=np.int64)
            return table[:, :64].reshape(-1, 8, 8).astype(np.float32), table[:, 64]
    raise RequestError(
        "data 'digits': scikit-learn, which ships these images, is not installed beside the framework; "
        "run `python -m pip install scikit-learn` there"
    )


def _upscale(images: np.ndarray) -> np.ndarray:
    """(n, 8, 8) to (n, 32, 32), bilinear, pixel centres at halves.

    The weights are eighths and the pixels small whole numbers, so every product and sum is exact in float32: the
    result has the same bits under any NumPy.
    """
    centres = (np.arange(32) + 0.5) / 4 - 0.5
    low = np.floor(centres).astype(int)
    share = (centres - low).astype(np.float32)
    weights = np.zeros((32, 8), np.float32)
    np.add.at(weights, (np.arange(32), np.clip(low, 0, 7)), 1 - share)
    np.add.at(weights, (np.arange(32), np.clip(low + 1, 0, 7)), share)
    return np.ascontiguousarray(weights @ images @ weights.T)


def _synthetic(data: Synthetic, classes: int, seed: int) -> Dataset:
    shape = (data.height, data.width, data.channels)
    random = np.random.default_rng([seed, 1])
    count = min(64, max(data.train_images, data.val_images))
    pool = ArraySplit(
        random.standard_normal((count, *shape), dtype=np.float32),
        random.integers(0, classes, count, dtype=np.int64),
    )
    return Dataset(PoolSplit(pool, data.train_images), PoolSplit(pool, data.val_images), shape, classes)
