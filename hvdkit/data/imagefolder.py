"""Images in a folder for each class, the usual layout of ImageNet: path/train/<class>/*.jpg, path/val/<class>/*.jpg.

A rank lists them once when it starts, compactly (1.28 million names take about 60 MB), and decodes them on demand.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hvdkit.data import pixels, prefetch
from hvdkit.data.augment import Stream, random_bits
from hvdkit.data.dataset import Augmentation, Batch, Dataset
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import ImageFolder

_CHECKED = 1024  # files whose first bytes are read before training, spread over all of them
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_REPLACEMENTS = 100  # images to try in place of a corrupt one


@dataclass(frozen=True)
class Listing:
    """The images of one split, by class and then by name; `names` are joined, `ends` is where each name ends."""

    folder: str
    classes: list[str]
    labels: np.ndarray  # (n,) int32
    names: bytes
    ends: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """The path of an image."""
        start = self.ends[index - 1] if index else 0
        name = os.fsdecode(self.names[start : self.ends[index]])
        return os.path.join(self.folder, self.classes[self.labels[index]], name)  # noqa: PTH118 - for each image


def open_folder(data: ImageFolder, local_size: int = 1) -> Dataset:
    """The data set. `local_size` ranks share the cores of this host.

    Raises RequestError with all faults: folders or images are missing, training and validation have different classes,
    a package for reading images is missing, or, with `corrupt: refuse`, one of 1,024 files is not an image by its first
    bytes.
    """
    workers = prefetch.threads(data.workers, local_size)
    if importlib.util.find_spec("PIL") is None:
        raise RequestError(
            "data 'imagefolder': Pillow, which reads images, is not installed beside the framework; "
            "run `python -m pip install Pillow` there"
        )
    prefetch.check_installed(workers)
    root = Path(data.path).expanduser()
    if not root.is_dir():
        raise RequestError(f"data.path: {root}: no such folder; expected one with train/<class> and val/<class> in it")
    faults: list[str] = []
    classes = [_classes(root / split, faults) for split in ("train", "val")]
    if not faults:
        faults += _compared(root, *classes)
    if faults:
        raise RequestError("\n".join(faults))
    listings = [_listing(root / split, classes[0], faults) for split in ("train", "val")]
    if not faults and data.corrupt == "refuse":
        faults += [fault for listing in listings for fault in _no_images(listing)]
    if faults:
        raise RequestError("\n".join(faults))
    corrupt: dict[str, str] = {}
    train, val = (ImageFolderSplit(listing, data, workers, corrupt) for listing in listings)
    return Dataset(train, val, (data.size, data.size, 3), len(classes[0]), corrupt)


@dataclass(frozen=True)
class ImageFolderSplit:
    """Images that `workers` threads decode ahead of the training loop.

    If an image cannot be read, the loop gets a RequestError, or (with `corrupt: replace`) another image in its place,
    which is recorded in `corrupt`.
    """

    listing: Listing
    data: ImageFolder
    workers: int
    corrupt: dict[str, str]

    def __len__(self) -> int:
        return len(self.listing)

    def batch(self, indices: np.ndarray) -> Batch:
        """The images at `indices` (n,), in that order, without augmentation."""
        return next(self.stream([indices], None))

    def stream(self, runs: Iterable[np.ndarray], augmentation: Augmentation | None) -> Iterator[Batch]:
        """A batch for each array of indices; without augmentation if it is None."""
        runs = list(runs)
        if not runs:
            return
        samples = np.concatenate(runs)
        seed, epoch = (augmentation.seed, augmentation.epoch) if augmentation else (0, 0)
        bits = random_bits(seed, epoch, samples)
        changed = augmentation is not None and augmentation.kind != "none"
        ahead = max(2 * len(runs[0]), 2 * self.workers)
        make = partial(self._sample, samples, bits, changed)
        with closing(prefetch.in_order(make, len(samples), self.workers, ahead)) as images:
            for run in runs:
                batch = Batch(
                    np.empty((len(run), self.data.size, self.data.size, 3), np.float32), np.empty(len(run), np.int64)
                )
                for row in range(len(run)):
                    batch.inputs[row], batch.targets[row] = next(images)
                yield batch

    def _sample(self, samples: np.ndarray, bits: np.ndarray, changed: bool, number: int) -> tuple[np.ndarray, int]:
        """The image (size, size, 3) float32 and label of `samples[number]`, or of its replacement."""
        index, size = int(samples[number]), self.data.size
        state = int(bits[number])
        image = None
        replacements = Stream(state ^ 1)  # a different stream than that of the augmentation
        for _ in range(_REPLACEMENTS):
            path = self.listing.path(index)
            try:
                image = pixels.read(path)
                break
            except pixels.CorruptImage as error:
                if self.data.corrupt == "refuse":
                    raise RequestError(
                        f"{path}: {error}; expected a JPEG or PNG image: mend or remove it, or set data.corrupt=replace"
                    ) from None
                self._note(path, str(error))
            index = replacements.next() % len(self)
        if image is None:
            raise RequestError(f"{self.listing.folder}: {_REPLACEMENTS} images drawn in a row cannot be read")
        label = int(self.listing.labels[index])
        if changed:
            return pixels.for_training(image, size, Stream(state)), label
        return pixels.for_evaluation(image, size, self.data.resize), label

    def _note(self, path: str, reason: str) -> None:
        if path not in self.corrupt:
            self.corrupt[path] = reason
            print(f"warning: {path}: {reason}; another image takes its place", file=sys.stderr, flush=True)


def _classes(folder: Path, faults: list[str]) -> list[str]:
    """The names of the class folders, sorted by code points."""
    expected = f"expected one folder a class in it, such as {folder / 'cat'}, with JPEG or PNG files"
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = "no such folder" if missing else f"cannot be read ({error.strerror})"
        faults.append(f"data.path: {folder}: {reason}; {expected}")
        return []
    if not names:
        faults.append(f"data.path: {folder}: no class folders; {expected}")
    return names


def _compared(root: Path, train: list[str], val: list[str]) -> list[str]:
    """A fault if the two splits have different classes."""
    different = sorted(set(train) ^ set(val))
    if not different:
        return []
    shown = ", ".join(f"{name!r} only in {'train' if name in train else 'val'}" for name in different[:3])
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    return [f"data.path: {root}: expected the same class folders in train and val; {shown}{more}"]


def _listing(folder: Path, classes: list[str], faults: list[str]) -> Listing:
    """All images below `folder`; a class without images is a fault."""
    counts, lengths, names = [], [], []
    for name in classes:
        encoded = [os.fsencode(each) for each in _images(folder / name, faults)]
        counts.append(len(encoded))
        lengths.append(np.array([len(each) for each in encoded], np.int64))
        names.append(b"".join(encoded))
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    return Listing(str(folder), classes, labels, b"".join(names), np.concatenate(lengths).cumsum())


def _images(folder: Path, faults: list[str]) -> list[str]:
    """The names of the images in a class folder, sorted by code points."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                entry.name
                for entry in entries
                if entry.name.lower().endswith(pixels.SUFFIXES) and not entry.name.startswith(".") and entry.is_file()
            )
    except OSError as error:
        faults.append(f"{folder}: cannot be read ({error.strerror}); expected a folder of images")
        return []
    if not found:
        suffixes = ", ".join(pixels.SUFFIXES)
        faults.append(f"{folder}: no images; expected files that end in {suffixes}, or no such folder")
    return found


def _no_images(listing: Listing) -> Iterator[str]:
    """A fault for each file that is not an image by its first bytes, among files spread over all."""
    for index in np.unique(np.linspace(0, len(listing) - 1, _CHECKED).astype(int)):
        path = listing.path(int(index))
        try:
            with Path(path).open("rb") as file:
                start = file.read(8)
        except OSError as error:
            yield f"{path}: cannot be read ({error.strerror}); expected a JPEG or PNG image"
            continue
        if not start.startswith(_SIGNATURES):
            yield (
                f"{path}: neither JPEG nor PNG, whatever its name says; mend or remove it, or set data.corrupt=replace"
            )
