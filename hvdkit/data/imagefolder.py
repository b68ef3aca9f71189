"""Images in one folder a class, as ImageNet usually lies on disk: path/train/<class>/*.jpg, path/val/<class>/*.jpg.

Listed once when a rank starts, compactly (1.28 million names take about 60 MB), and decoded when they are asked for.
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
from hvdkit.data.dataset import Batch, Dataset, Drawing
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import ImageFolder

_LOOKED_INTO = 1024  # files whose first bytes are read before training, spread over all
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_REPLACEMENTS = 100  # draws for one corrupt image


@dataclass(frozen=True)
class Listing:
    """The images of one split, class by class, each class in sorted order: `names` joined, and where each one ends."""

    folder: str
    classes: list[str]
    labels: np.ndarray  # (n,) int32
    names: bytes
    ends: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Of one image."""
        start = self.ends[index - 1] if index else 0
        name = os.fsdecode(self.names[start : self.ends[index]])
        return os.path.join(self.folder, self.classes[self.labels[index]], name)  # noqa: PTH118 - for each image


def open_folder(data: ImageFolder, local_size: int = 1) -> Dataset:
    """The data set; `local_size` ranks share this host's cores.

    Raises RequestError, all faults at once, where folders or images are missing, training and validation have other
    classes, what reads images is not installed or, with `corrupt: refuse`, a file is no image (of the first
    bytes of 1,024 files).
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
    """Images that are decoded when they are asked for, `workers` threads ahead of the training loop.

    Raises RequestError from the loop where an image cannot be read, or else takes another one in its place and
    notes it in `corrupt`.
    """

    listing: Listing
    data: ImageFolder
    workers: int
    corrupt: dict[str, str]

    def __len__(self) -> int:
        return len(self.listing)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order, as they are evaluated."""
        return next(self.stream([indices], None))

    def stream(self, runs: Iterable[np.ndarray], drawing: Drawing | None) -> Iterator[Batch]:
        """A batch for each run of sample numbers; as they are evaluated where `drawing` is None."""
        runs = list(runs)
        if not runs:
            return
        samples = np.concatenate(runs)
        bits = random_bits(drawing.seed, drawing.epoch, samples) if drawing else random_bits(0, 0, samples)
        changed = drawing is not None and drawing.augmentation != "none"
        ahead = max(2 * len(runs[0]), 2 * self.workers)
        make = partial(self._sample, samples, bits, changed)
        with closing(prefetch.in_order(make, len(samples), self.workers, ahead)) as made:
            for run in runs:
                batch = Batch(
                    np.empty((len(run), self.data.size, self.data.size, 3), np.float32), np.empty(len(run), np.int64)
                )
                for row in range(len(run)):
                    batch.images[row], batch.labels[row] = next(made)
                yield batch

    def _sample(self, samples: np.ndarray, bits: np.ndarray, changed: bool, number: int) -> tuple[np.ndarray, int]:
        """Image (size, size, 3) float32 and label of `samples[number]`, or of what stands in for it."""
        index, size = int(samples[number]), self.data.size
        state = int(bits[number])
        image = None
        stand_ins = Stream(state ^ 1)  # another stream than that of the changes
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
            index = stand_ins.next() % len(self)
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
    """The names of the classes' folders, sorted by code points."""
    expected = f"expected one folder a class in it, such as {folder / 'cat'}, with JPEG or PNG files"
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        faults.append(f"data.path: {folder}: no such folder; {expected}")
    except OSError as error:
        faults.append(f"data.path: {folder}: cannot be read ({error.strerror}); {expected}")
    else:
        if not names:
            faults.append(f"data.path: {folder}: no class folders; {expected}")
        return names
    return []


def _compared(root: Path, train: list[str], val: list[str]) -> list[str]:
    """A fault where the two splits have other classes."""
    apart = sorted(set(train) ^ set(val))
    if not apart:
        return []
    shown = ", ".join(f"{name!r} only in {'train' if name in train else 'val'}" for name in apart[:3])
    more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
    return [f"data.path: {root}: expected the same class folders in train and val; {shown}{more}"]


def _listing(folder: Path, classes: list[str], faults: list[str]) -> Listing:
    """All images below `folder`; a class without one is a fault."""
    counts, ends, names, total = [], [], [], 0
    for name in classes:
        place = folder / name
        try:
            with os.scandir(place) as entries:
                found = sorted(
                    entry.name
                    for entry in entries
                    if entry.name.lower().endswith(pixels.SUFFIXES)
                    and not entry.name.startswith(".")
                    and entry.is_file()
                )
        except OSError as error:
            faults.append(f"{place}: cannot be read ({error.strerror}); expected a folder of images")
            continue
        if not found:
            faults.append(
                f"{place}: no images; expected files that end in {', '.join(pixels.SUFFIXES)}, or no such folder"
            )
            continue
        encoded = [os.fsencode(each) for each in found]
        names.append(b"".join(encoded))
        ends.append(total + np.cumsum([len(each) for each in encoded]))
        total = int(ends[-1][-1])
        counts.append(len(found))
    if faults:
        return Listing(str(folder), classes, np.empty(0, np.int32), b"", np.empty(0, np.int64))
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    return Listing(str(folder), classes, labels, b"".join(names), np.concatenate(ends))


def _no_images(listing: Listing) -> Iterator[str]:
    """Faults of files that are no images by their first bytes, of some files spread over all."""
    for index in np.unique(np.linspace(0, len(listing) - 1, _LOOKED_INTO).astype(int)):
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
