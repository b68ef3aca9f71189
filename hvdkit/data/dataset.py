"""What a data set is made of: batches, and splits whose samples are picked by number.

Images are float32, NHWC; labels int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """`images` (n, height, width, channels) float32 and `labels` (n,) int64."""

    images: np.ndarray
    labels: np.ndarray


class PooledBatch(Batch):
    """The samples `indices` of a pool. Its arrays are picked here only where somebody reads them here."""

    def __init__(self, pool: ArraySplit, indices: np.ndarray) -> None:
        object.__setattr__(self, "pool", pool)
        object.__setattr__(self, "indices", indices)

    pool: ArraySplit
    indices: np.ndarray

    @property
    def images(self) -> np.ndarray:
        """As a Batch's."""
        return np.take(self.pool.images, self.indices, axis=0)

    @property
    def labels(self) -> np.ndarray:
        """As a Batch's."""
        return np.take(self.pool.labels, self.indices, axis=0)


def on_device(
    batch: Batch,
    pools: dict[int, T],
    put: Callable[[np.ndarray], T],
    pick: Callable[[T, np.ndarray], T],
) -> T:
    """The batch's images on a device: `put` there, or picked by their numbers from the pool, which is put there once.

    `pools` keeps them, one dict a session.
    """
    if not isinstance(batch, PooledBatch):
        return put(batch.images)
    if id(batch.pool) not in pools:
        pools[id(batch.pool)] = put(batch.pool.images)
    return pick(pools[id(batch.pool)], batch.indices)


class Split(Protocol):
    """Samples that can be picked by number."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order, as they are evaluated."""


@dataclass(frozen=True)
class Drawing:
    """What decides the random changes of training images, together with each sample's number."""

    augmentation: str
    seed: int
    epoch: int


@runtime_checkable
class StreamedSplit(Split, Protocol):
    """Samples that are made when they are asked for, some ahead of the training loop, and change themselves."""

    def stream(self, runs: Iterable[np.ndarray], drawing: Drawing | None) -> Iterator[Batch]:
        """A batch for each run of sample numbers, in order; as they are evaluated where `drawing` is None.

        Closing the iterator ends all work at once.
        """


@runtime_checkable
class NativeSplit(Split, Protocol):
    """Batches that come as they come: from a user's own pipeline, which shuffles, changes and divides by itself."""

    def train_batches(self, epoch: int, batches: int) -> Iterator[Batch]:
        """This rank's `batches` batches of one epoch."""

    def evaluation_batches(self) -> Iterator[tuple[Batch, int]]:
        """This rank's share as `core.data.evaluation_batches` yields it."""


@dataclass(frozen=True)
class ArraySplit:
    """A split held in memory."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        return Batch(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class PoolSplit:
    """As many samples as asked for, all drawn from a small pool, so that images of any size fit in memory."""

    pool: ArraySplit
    length: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        return self.pool.batch(indices % len(self.pool))

    def pooled(self, indices: np.ndarray) -> PooledBatch:
        """The same, left where they are."""
        return PooledBatch(self.pool, indices % len(self.pool))


@dataclass(frozen=True)
class Dataset:
    """A training and a validation split; `shape` is (height, width, channels).

    `corrupt` fills up while samples are read: each image that had to be replaced, with the reason. `native` says that
    batches come from a pipeline of the user's own.
    """

    train: Split
    val: Split
    shape: tuple[int, int, int]
    classes: int
    corrupt: dict[str, str] = field(default_factory=dict)
    native: bool = False


def normalised(pixels: np.ndarray, mean: tuple[float, ...], deviation: tuple[float, ...]) -> np.ndarray:
    """(…, width, channels) uint8 as float32: (v − 255·mean) · 1/(255·deviation), both constants rounded to float32.

    Two roundings a pixel, each of one elementary operation: the same bits under any NumPy.
    """
    offset = (255 * np.array(mean)).astype(np.float32)
    factor = (1 / (255 * np.array(deviation))).astype(np.float32)
    # A whole row at once: NumPy's inner loop over three channels would take ten times as long.
    width, channels = pixels.shape[-2:]
    rows = pixels.reshape(*pixels.shape[:-2], width * channels).astype(np.float32)
    rows -= np.tile(offset, width)
    rows *= np.tile(factor, width)
    return rows.reshape(pixels.shape)
