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
# Whole numbers and floats that PyTorch, TensorFlow and MXNet all compute with; others become the widest of their kind.
_COMMON = {"bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"}
_WIDEST = {"i": "int64", "u": "int64", "f": "float64"}


@dataclass(frozen=True)
class Batch:
    """`inputs` (n, …), such as float32 images, or a tuple of them for a model with several inputs, and their
    `targets` (n, …), such as int64 labels.

    Here, for every split and framework, what users bring becomes arrays. Raises RequestError for
    anything but numbers.
    """

    inputs: Inputs
    targets: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", mapped(partial(prepared, "Batch: inputs"), self.inputs))
        object.__setattr__(self, "targets", prepared("Batch: targets", self.targets, integers="int64"))


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
        inputs: T = mapped(put, batch.inputs)
        return inputs
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

    Arrays keep their dtype and layout, also memory maps; a batch of them is converted. Raises RequestError for arrays
    of anything but numbers, and if lengths differ.
    """

    inputs: Inputs
    targets: np.ndarray

    def __post_init__(self) -> None:
        inputs = mapped(partial(array_of, "ArraySplit: inputs"), self.inputs)
        object.__setattr__(self, "targets", array_of("ArraySplit: targets", self.targets))
        shapes = [array.shape for array in (*arguments(inputs), self.targets)]
        if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
            several = isinstance(self.inputs, list) and len(inputs) != len(self.targets)
            raise RequestError(
                f"ArraySplit: expected as many targets as inputs, got inputs of shape "
                f"{' and '.join(map(str, shapes[:-1]))}, targets {shapes[-1]}"
                + ("; several inputs are a tuple, not a list" if several else "")
            )
        object.__setattr__(self, "inputs", inputs)

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        return Batch(mapped(lambda array: array[indices], self.inputs), self.targets[indices])


def array_of(name: str, values: Any) -> np.ndarray:
    """`values` as an array of their own dtype and layout: arrays, tensors on any device, data frames, lists.

    A bfloat16 tensor becomes float32, as NumPy has no such dtype. Raises RequestError for anything but real numbers.
    """
    array = values if type(values) in (np.ndarray, np.memmap) else converted(name, values)
    if array.dtype.kind not in "biuf":
        of = "" if isinstance(values, np.ndarray) else f" of a {type(values).__name__}"
        raise RequestError(f"{name}: expected numbers, got the dtype {array.dtype}{of}")
    return array


def prepared(name: str, values: Any, integers: str = "") -> np.ndarray:
    """`values` as the frameworks take them: C-contiguous, writable, in this machine's byte order.

    Whole numbers are cast to the dtype `integers` if given (bool stays), and where a framework lacks their dtype.
    Raises RequestError for anything but numbers, and for whole numbers that int64 does not hold.
    """
    complex_ = type(values) is np.ndarray and values.dtype.kind == "c"  # of a user's batch; no framework's labels
    array = values if complex_ else array_of(name, values)
    dtype = array.dtype
    wanted = dtype.name if dtype.name in _COMMON else _WIDEST.get(dtype.kind, dtype.name)
    if integers and dtype.kind in "iu":
        wanted = integers
    if dtype.kind == "u" and dtype.itemsize == 8 and array.size and array.max() > np.iinfo(np.int64).max:
        raise RequestError(f"{name}: expected whole numbers below 2^63, got {array.max()}")
    if dtype.name == wanted and dtype.isnative and array.flags.c_contiguous and array.flags.writeable:
        return array
    return np.array(array, wanted, order="C")  # copies


def converted(name: str, values: Any) -> np.ndarray:
    """A tensor of any framework, or what NumPy takes, as an array of its dtype; bfloat16 becomes float32."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise RequestError(f"{name}: expected numbers, got a masked array with values that are masked; fill them")
    for method in ("detach", "cpu"):  # of a tensor that has a gradient, or is on a GPU
        values = getattr(values, method, lambda values=values: values)()
    if hasattr(values, "asnumpy"):
        return np.asarray(values.asnumpy())
    try:
        half = str(getattr(values, "dtype", "")).endswith(".bfloat16") and hasattr(values, "float")
        array = np.asarray(values.float() if half else values)
    except (TypeError, ValueError, RuntimeError) as error:  # such as rows of unequal length
        reason = str(error).partition("\n")[0][:200]
        raise RequestError(f"{name}: expected numbers, got a {type(values).__name__} ({reason})") from None
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


@dataclass(frozen=True)
class GivenSplit:
    """A split of the user's own class. Its `batch` may return a `Batch` or a pair, (inputs, targets).

    With `labels`, bool targets become 0 and 1, as the recipe's cross-entropy takes them.
    """

    split: Any
    labels: bool = False

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order. Raises RequestError for anything but a batch."""
        given = self.split.batch(indices)
        is_pair = isinstance(given, tuple) or (isinstance(given, list) and all(hasattr(x, "shape") for x in given))
        pair = given if is_pair else [getattr(given, name, None) for name in ("inputs", "targets")]
        if len(pair) != 2 or any(array is None for array in pair):
            raise RequestError(
                f"{type(self.split).__name__}.batch: expected Batch(inputs, targets), got a {type(given).__name__}"
            )
        batch = given if isinstance(given, Batch) else Batch(*pair)
        is_mask = self.labels and batch.targets.dtype == bool
        return Batch(batch.inputs, batch.targets.astype(np.int64)) if is_mask else batch


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
class SharedSplit:
    """A split of which this rank has the share `mine`; `counts` are the samples of each rank's.

    Its length counts the samples of all ranks. An epoch of training takes as many of each share as the shortest has, so
    there the `length` is less where shares differ. `spare` has the sample that stands for one where the share is empty.
    """

    mine: Split
    counts: tuple[int, ...]
    length: int
    spare: Split

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples of this rank's share at `indices` (n,), which all ranks' samples have."""
        split = self.mine if len(self.mine) else self.spare
        return split.batch(indices % len(split))

    def epoch(self, seed: int, epoch: int, rank: int) -> np.ndarray:
        """The order of this rank's own samples in an epoch."""
        return np.random.default_rng([seed, epoch, rank]).permutation(len(self.mine))


def own_share(split: Split) -> Split:
    """What of a split this rank has itself."""
    return split.mine if isinstance(split, SharedSplit) else split


@dataclass(frozen=True)
class Fingerprint:
    """By which other samples are noticed (`data.fingerprint`): the number of a split's samples, digests of their inputs
    and targets, and of what the digests were `taken`.

    A digest is SHA-256 over CRC-32 of blocks, or None where nothing can be compared. Digests of two fingerprints can be
    compared if both were taken of the same.
    """

    samples: int
    inputs: str | None = None
    targets: str | None = None
    taken: str = "nothing"

    def other(self, than: Fingerprint) -> str | None:
        """What is different in `than`: `number`, `inputs`, `targets`, or None if nothing is known to be."""
        if self.samples != than.samples:
            return "number"
        if self.taken != than.taken:
            return None
        pairs = ((name, getattr(self, name), getattr(than, name)) for name in ("inputs", "targets"))
        return next((name for name, mine, theirs in pairs if mine and theirs and mine != theirs), None)


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
    `note` is a line for rank 0's log. `left_out` has lines about what is on disk and not in the data set.
    `text_sha256` is that of a text. `fingerprints` are those of the splits, where they have been taken
    (`data.fingerprint`).
    """

    train: Split
    val: Split
    shape: tuple[int, ...]
    classes: int
    corrupt: dict[str, str] = field(default_factory=dict)
    native: bool = False
    preprocessing: Preprocessing | None = None
    note: str | None = None
    left_out: tuple[str, ...] = ()
    text_sha256: str | None = None
    fingerprints: dict[str, Fingerprint] | None = None
