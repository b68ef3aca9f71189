"""Data sets: a training and a validation split, whose samples have indices, and batches of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from hvdkit.errors import RequestError

T = TypeVar("T")
Inputs = Any  # an array, or a tuple of arrays


@dataclass(frozen=True)
class Batch:
    """`inputs` (n, …), such as float32 images, or a tuple of them for a model with several inputs, and their
    `targets` (n, …), such as int64 labels."""

    inputs: Inputs
    targets: np.ndarray


class PooledBatch(Batch):
    """The samples at `indices` of a pool. The arrays are made only when they are read."""

    def __init__(self, pool: ArraySplit, indices: np.ndarray) -> None:
        object.__setattr__(self, "pool", pool)
        object.__setattr__(self, "indices", indices)

    pool: ArraySplit
    indices: np.ndarray

    @property
    def inputs(self) -> np.ndarray:
        """As in `Batch`."""
        return np.take(self.pool.inputs, self.indices, axis=0)

    @property
    def targets(self) -> np.ndarray:
        """As in `Batch`."""
        return np.take(self.pool.targets, self.indices, axis=0)


def mapped(function: Callable[[Any], Any], inputs: Inputs) -> Any:
    """The function's result for the inputs, for several a tuple."""
    return tuple(map(function, inputs)) if isinstance(inputs, tuple) else function(inputs)


def arguments(inputs: Any) -> tuple[Any, ...]:
    """The inputs as the arguments of a model."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def on_device(
    batch: Batch,
    pools: dict[int, T],
    put: Callable[[np.ndarray], T],
    pick: Callable[[T, np.ndarray], T],
) -> T:
    """The batch's samples on a device, by `put`. A pool is put there once, and `pick` selects samples of it there.

    `pools` holds the pools that are on the device, one dict for each session.
    """
    if not isinstance(batch, PooledBatch):
        found: T = mapped(put, batch.inputs)
        return found
    if id(batch.pool) not in pools:
        pools[id(batch.pool)] = put(batch.pool.inputs)
    return pick(pools[id(batch.pool)], batch.indices)


class Split(Protocol):
    """Samples that can be selected by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices` (n,), in that order, without augmentation."""


@dataclass(frozen=True)
class Augmentation:
    """What random augmentation depends on, in addition to each sample's index. `kind` is the recipe's."""

    kind: str
    seed: int
    epoch: int


@runtime_checkable
class StreamedSplit(Split, Protocol):
    """Samples that are read on demand, ahead of the training loop, and augmented by the split itself."""

    def stream(self, runs: Iterable[np.ndarray], augmentation: Augmentation | None) -> Iterator[Batch]:
        """A batch for each array of indices, in order. Closing the iterator ends all work at once."""


@runtime_checkable
class BatchedSplit(Split, Protocol):
    """Samples that come in batches from elsewhere, such as a user pipeline."""

    def train_batches(self, epoch: int, batches: int) -> Iterator[Batch]:
        """This rank's first `batches` batches of one epoch."""

    def evaluation_batches(self) -> Iterator[tuple[Batch, int]]:
        """Yields (batch, valid) of this rank's samples, as `batches.evaluation_batches` does."""


@dataclass(frozen=True)
class ArraySplit:
    """A split held in memory; `inputs` as in `Batch`. What is no array, such as a list or a tensor, becomes one.

    Raises RequestError for arrays of anything but numbers, and if lengths differ.
    """

    inputs: Inputs
    targets: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", mapped(partial(_numbers, "inputs"), self.inputs))
        object.__setattr__(self, "targets", _numbers("targets", self.targets))
        shapes = [np.shape(each) for each in (*arguments(self.inputs), self.targets)]
        if len({shape[:1] for shape in shapes}) != 1:
            inputs = " and ".join(map(str, shapes[:-1]))
            raise RequestError(
                f"ArraySplit: expected as many targets as inputs, got inputs of shape {inputs}, targets {shapes[-1]}"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        return Batch(mapped(lambda each: each[indices], self.inputs), self.targets[indices])


def _numbers(name: str, values: Any) -> np.ndarray:
    found = values if isinstance(values, np.ndarray) else np.asarray(values)
    if found.dtype.kind not in "biuf":
        raise RequestError(f"ArraySplit: expected {name} that are numbers, got the dtype {found.dtype}")
    return found


@dataclass(frozen=True)
class PoolSplit:
    """`length` samples that repeat those of a small pool, so that samples of any size fit in memory."""

    pool: ArraySplit
    length: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        return self.pool.batch(indices % len(self.pool))

    def pooled(self, indices: np.ndarray) -> PooledBatch:
        """The same samples, which stay in the pool."""
        return PooledBatch(self.pool, indices % len(self.pool))


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes a model's input, and what its outputs mean; checkpoints have it.

    A picture is resized until its shorter side is `resize`, and the centre of `size` × `size` is taken. A value v of
    0 to 1 in one of its `channels` becomes (v − mean) / std.
    """

    class_names: tuple[str, ...]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int = 3
    resize: int | None = None


@dataclass(frozen=True)
class Dataset:
    """A training and a validation split of samples of `shape`.

    `corrupt` has the samples that were replaced while reading, each with the reason. `native` says that the batches
    come from a user pipeline. `preprocessing` is there if a picture that is not in the data set can be classified.
    `note` is a line for rank 0's log. `text_sha256` is that of a text.
    """

    train: Split
    val: Split
    shape: tuple[int, ...]
    classes: int
    corrupt: dict[str, str] = field(default_factory=dict)
    native: bool = False
    preprocessing: Preprocessing | None = None
    note: str | None = None
    text_sha256: str | None = None
