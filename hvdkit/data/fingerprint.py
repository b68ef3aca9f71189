"""Fingerprints of splits, by which other samples are noticed: on another rank, or by a run that is resumed."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdkit.data.dataset import ArraySplit, BatchedSplit, Dataset, Fingerprint, Split, arguments

IN_MEMORY = 256 * 2**20  # bytes of an array that are read; of a larger one as many, in samples spread over it
READ = 8  # samples that are read from where they are, spread over all
AGAIN = 2  # of them are read twice
FILES = 4096  # files whose sizes are taken, spread over all
_BLOCK = 2**20  # bytes


@runtime_checkable
class FilesSplit(Split, Protocol):
    """Samples that are files, which need not be read to see that they are others."""

    def fingerprint_of_files(self) -> Fingerprint:
        """As `of_files` returns it."""


def of_dataset(dataset: Dataset) -> dict[str, Fingerprint]:
    """The fingerprints of `train` and `val`; of a user pipeline only the number of training samples is known."""
    if dataset.fingerprints is not None:
        return dataset.fingerprints
    splits = {"train": dataset.train} if dataset.native else {"train": dataset.train, "val": dataset.val}
    return {name: of_split(split) for name, split in splits.items()}


def of_split(split: Split) -> Fingerprint:
    """The fingerprint of a split: of its files, of its arrays, or of some samples that `batch` returns.

    An array split whose `batch` is not ArraySplit's has all three.
    """
    if isinstance(split, FilesSplit):
        return split.fingerprint_of_files()
    if isinstance(split, BatchedSplit) or not len(split):
        return Fingerprint(len(split))
    if not isinstance(split, ArraySplit):
        return _read(split)
    inputs, targets = (_of_arrays(arrays) for arrays in (arguments(split.inputs), [split.targets]))
    fingerprint = Fingerprint(len(split), inputs, targets, "arrays")
    if type(split).batch is ArraySplit.batch:
        return fingerprint
    read = _read(split)
    return Fingerprint(
        len(split), joined([inputs, read.inputs]), joined([targets, read.targets]), f"arrays, {read.taken}"
    )


def of_files(names: Iterable[bytes], path: Callable[[int], str], targets: Iterable[bytes], count: int) -> Fingerprint:
    """By the names of all files, the sizes of some that are spread over all, and what says their targets."""
    samples, labels = hashlib.sha256(), hashlib.sha256()
    for name in names:
        samples.update(name)
    for name in targets:
        labels.update(name)
    for index in spread(count, FILES):
        size = -1
        with suppress(OSError):  # the loop says what is wrong with it when it is read
            size = os.stat(path(int(index))).st_size  # noqa: PTH116 - a path object for each takes as long as the call
        samples.update(b" %d" % size)
    return Fingerprint(count, samples.hexdigest(), labels.hexdigest(), "names and sizes of files")


def joined(digests: Iterable[str | None]) -> str | None:
    """One digest of several; None if there is none."""
    known = [digest for digest in digests if digest]
    return hashlib.sha256(" ".join(known).encode()).hexdigest() if known else None


def _read(split: Split) -> Fingerprint:
    """By samples that `batch` returns. What is drawn anew each time, such as an augmentation, is not compared."""
    count = len(split)
    chosen = spread(count, READ)
    first, again = split.batch(chosen), split.batch(chosen[:AGAIN])

    def digest(name: str) -> str | None:
        first_read, second_read = (
            [np.asarray(array) for array in arguments(getattr(batch, name))] for batch in (first, again)
        )
        same = all(
            np.array_equal(a[:AGAIN], b, equal_nan=a.dtype.kind in "fc")
            for a, b in zip(first_read, second_read, strict=True)
        )
        return _of_arrays(first_read) if same else None

    return Fingerprint(count, digest("inputs"), digest("targets"), f"{len(chosen)} samples")


def _of_arrays(arrays: Iterable[Any]) -> str:
    total = hashlib.sha256()
    for given in arrays:
        array = np.asarray(given)
        total.update(f"{array.dtype.str} {array.shape}".encode())
        rows = len(array) if array.ndim else 1
        array = array.reshape(rows, *array.shape[1:])
        size = max(1, array.nbytes // max(1, rows))
        most = READ if _is_mapped(given) else max(READ, IN_MEMORY // size)
        at_once = max(1, _BLOCK // size)
        if rows <= most:
            blocks = (array[start : start + at_once] for start in range(0, rows, at_once))
        else:
            chosen = spread(rows, most)
            blocks = (array[chosen[start : start + at_once]] for start in range(0, most, at_once))
        for block in blocks:
            content = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            total.update(zlib.crc32(content.data).to_bytes(4, "big"))
    return total.hexdigest()


def spread(count: int, most: int) -> np.ndarray:
    """At most so many different indices below `count`, spread evenly over them, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _is_mapped(array: Any) -> bool:
    """Whether it is a memory map, or a view of one."""
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False
