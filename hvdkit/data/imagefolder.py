"""Images in a folder for each class, the usual layout of ImageNet: path/train/<class>/*.jpg, path/val/<class>/*.jpg.

Without `val`, or with the class folders directly below the path, a part of each class is held out for validation.
A rank lists them once when it starts (data/walk.py), compactly (1.28 million names take about 60 MB), and decodes them
on demand. A class is a folder's name in Unicode's composed form, since file systems and archives change the form.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.data import Shard, pixels, prefetch, require, walk
from hvdkit.data.augment import RandomStream, random_bits
from hvdkit.data.dataset import Augmentation, Batch, Dataset, Fingerprint, Preprocessing
from hvdkit.data.fingerprint import of_files, spread
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import ImageFolder

if TYPE_CHECKING:
    from PIL.Image import Image

_CHECKED = 1024  # files whose first bytes are read before training, spread over all of them
_REPLACEMENTS = 100  # images to try in place of a corrupt one


@dataclass(frozen=True)
class Listing:
    """The images of one split, by class and then by name; `names` are joined, `ends` is where each name ends.

    `folders` are the names of the class folders as they are on disk.
    """

    folder: str
    folders: list[str]
    labels: np.ndarray  # (n,) int32
    names: bytes
    ends: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """The path of an image."""
        start = self.ends[index - 1] if index else 0
        name = os.fsdecode(self.names[start : self.ends[index]])
        return os.path.join(self.folder, self.folders[self.labels[index]], name)  # noqa: PTH118 - for each image


@dataclass(frozen=True)
class Folder:
    """The images of both splits. `held_out` says that `val` is a part of the training folder's images; `left_out`
    counts what is in the folder and in neither split, by reason. `classes` are the classes' names; a label is a place
    in it."""

    train: Listing
    val: Listing
    classes: list[str]
    held_out: bool
    left_out: Counter[str]

    @property
    def division(self) -> str:
        """How the images are divided, in a line."""
        why = ": there is no folder val, and a share of data.validation of each class is held out"
        return f"{len(self.train)} images for training, {len(self.val)} for validation{why if self.held_out else ''}"


def look(data: ImageFolder, seed: int) -> Folder:
    """List the images. Which ones are held out depends on the seed and on their names only.

    Raises RequestError with all faults: folders or images are missing, or training and validation have different
    classes.
    """
    root = Path(data.path)
    try:
        names = {entry.name for entry in walk.visible(root)}
    except OSError as error:
        known = {errno.ENOENT: "no such folder", errno.ENOTDIR: "is a file"}
        reason = known.get(error.errno or 0) or f"cannot be read ({error.strerror})"
        raise RequestError(
            f"data.path: {root}: {reason}; expected one with a folder of images for each class, or with train/<class> "
            "and val/<class>; give data.path=FOLDER"
        ) from error
    has_val = "val" in names
    # a folder that holds images may be called train where it is a class, beside car and bus
    train_root = root / "train" if has_val or any(_folders(root / "train")) else root
    val_root = root / "val" if has_val else train_root
    faults: list[str] = []
    left_out: Counter[str] = Counter()
    classes = _classes(train_root, faults, left_out)
    val_classes = _classes(val_root, faults, left_out) if has_val else classes
    if not faults:
        faults += _compared(root, classes, val_classes)
    if train_root != root and (others := len(names - {"train", "val"})):
        left_out["beside train and val"] += others
    other = next((root / name for name in ("validation", "valid") if name in names and (root / name).is_dir()), None)
    if other and not has_val and train_root != root:
        faults.append(f"data.path: {root / 'val'}: no such folder, but {other} is there; rename it to val")
    if faults:
        raise RequestError("\n".join(faults))
    train_names = [_images(train_root / folder, faults, left_out) for folder in classes.values()]
    if has_val:
        val_names = [_images(val_root / val_classes[name], faults, left_out) for name in classes]
    else:
        share = data.validation
        both = zip(train_names, classes.values(), strict=True)
        halves = [_parted(files, folder, seed, share) for files, folder in both]
        train_names, val_names = [half[0] for half in halves], [half[1] for half in halves]
    if faults:
        raise RequestError("\n".join(faults))
    train = _listing(train_root, [*classes.values()], train_names)
    val = _listing(val_root, [val_classes[name] for name in classes], val_names)
    return Folder(train, val, [*classes], not has_val, left_out)


def check_packages(workers: int = 0) -> None:
    """Raise RequestError if a package that reads images, or reads them ahead, is missing."""
    require("PIL", "data 'imagefolder': Pillow, which reads images", "Pillow")
    if workers:
        what = "data.workers: grain, which reads images ahead"
        require("grain", what, "grain", ", or set data.workers=0")


def open_folder(data: ImageFolder, seed: int, shard: Shard) -> Dataset:
    """The data set, whose sizes are decided.

    Raises RequestError as `look` does, and if a package for reading images is missing, or, with `corrupt: refuse`, one
    of 1,024 files is not an image by its first bytes.
    """
    workers = prefetch.threads(data.workers, shard.local_size)
    check_packages(workers)
    folder = look(data, seed)
    listings = folder.train, folder.val
    if data.corrupt == "refuse":
        faults = [fault for listing in listings if len(listing) for fault in _no_images(listing)]
        if faults:
            raise RequestError("\n".join(faults))
    corrupt: dict[str, str] = {}
    train, val = (ImageFolderSplit(listing, data, workers, corrupt) for listing in listings)
    size, resize = int(data.size), int(data.resize)
    return Dataset(
        train, val, (size, size, 3), len(folder.classes), corrupt,
        preprocessing=Preprocessing(tuple(folder.classes), size, pixels.MEAN, pixels.DEVIATION, resize=resize),
        note=folder.division if folder.held_out else None,
        left_out=tuple(filter(None, [walk.line(data.path, folder.left_out)])),
    )  # fmt: skip


def damaged(data: ImageFolder, seed: int, seconds: float) -> tuple[dict[str, str], int, int]:
    """Decode images spread over all of the folder, for so many seconds at most.

    Returns the files that cannot be read, each with the reason, how many were decoded, and how many there are.
    """
    folder, until = look(data, seed), time.monotonic() + seconds
    images = [(split, index) for split in (folder.train, folder.val) for index in range(len(split))]
    reasons: dict[str, str] = {}
    for number, image in enumerate(random.Random(seed).sample(images, len(images))):
        if time.monotonic() > until:
            return reasons, number, len(images)
        path = image[0].path(image[1])
        try:
            read(data, path)
        except pixels.CorruptImage as error:
            reasons[path] = str(error)
    return reasons, len(images), len(images)


def read(data: ImageFolder, path: str) -> Image:
    """An image as the data set decodes it. Raises pixels.CorruptImage."""
    # a training crop has at least 8 % of the area, so a quarter of the side: it is not enlarged either
    return pixels.read(path, data.exif_orientation, 4 * int(data.resize) if data.reduced_jpeg else None)


def printable(name: str) -> str:
    """A file's name as text: bytes that are no UTF-8 are replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


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
        bits, size = random_bits(seed, epoch, samples), int(self.data.size)
        changed = augmentation is not None and augmentation.kind != "none"
        ahead = max(2 * len(runs[0]), 2 * self.workers)
        make = partial(self._sample, samples, bits, changed)
        with closing(prefetch.in_order(make, len(samples), self.workers, ahead)) as images:
            for run in runs:
                batch = Batch(np.empty((len(run), size, size, 3), np.float32), np.empty(len(run), np.int64))
                for row in range(len(run)):
                    batch.inputs[row], batch.targets[row] = next(images)
                yield batch

    def fingerprint_of_files(self) -> Fingerprint:
        """Of names and sizes, wherever the folder is; classes and labels are the targets."""
        listing = self.listing
        names = (listing.names, listing.ends.tobytes())
        labels = (listing.labels.tobytes(), *map(os.fsencode, listing.folders))
        return of_files(names, listing.path, labels, len(listing))

    def _sample(self, samples: np.ndarray, bits: np.ndarray, changed: bool, number: int) -> tuple[np.ndarray, int]:
        """The image (size, size, 3) float32 and label of `samples[number]`, or of its replacement."""
        index, size = int(samples[number]), int(self.data.size)
        state = int(bits[number])
        image = None
        replacements = RandomStream(state ^ 1)  # a different stream than that of the augmentation
        for _ in range(_REPLACEMENTS):
            path = self.listing.path(index)
            try:
                image = read(self.data, path)
                break
            except pixels.CorruptImage as error:
                if self.data.corrupt == "refuse":
                    raise RequestError(
                        f"{path}: {error}; expected a JPEG or PNG image: fix or remove it, or set data.corrupt=replace"
                    ) from None
                self._note(path, str(error))
            index = replacements.next() % len(self)
        if image is None:
            raise RequestError(f"{self.listing.folder}: {_REPLACEMENTS} images drawn in a row cannot be read")
        label = int(self.listing.labels[index])
        if changed:
            return pixels.for_training(image, size, RandomStream(state)), label
        return pixels.for_evaluation(image, size, int(self.data.resize)), label

    def _note(self, path: str, reason: str) -> None:
        if path not in self.corrupt:
            self.corrupt[path] = reason
            print(f"warning: {path}: {reason}; another image takes its place", file=sys.stderr, flush=True)


def _folders(path: Path) -> list[str]:
    """The names of the folders in a folder; none if it is not there or cannot be read."""
    with suppress(OSError):
        return walk.folders(path)
    return []


def class_name(folder: str) -> str:
    """The class of the images in a folder of this name: the same in every Unicode form of it."""
    return unicodedata.normalize("NFC", printable(folder))


def _classes(folder: Path, faults: list[str], left_out: Counter[str]) -> dict[str, str]:
    """The classes, sorted by code points, and the folder of each."""
    expected = f"expected one folder a class in it, such as {folder / 'cat'}, with JPEG or PNG files"
    try:
        names = walk.folders(folder, left_out)
    except (FileNotFoundError, NotADirectoryError):
        names = None
    except OSError as error:
        faults.append(f"data.path: {folder}: cannot be read ({error.strerror}); {expected}")
        return {}
    if not names:
        what = "no such folder" if names is None else f"no class folders{walk.content(folder)}"
        faults.append(f"data.path: {folder}: {what}; {expected}")
    classes: dict[str, str] = {}
    for name in names or []:
        if (former := classes.setdefault(class_name(name), name)) != name:
            faults.append(
                f"data.path: {folder}: the folders {former!a} and {name!a} have the same name, "
                f"{class_name(name)!r}, in two forms; move the images into one of them"
            )
    return dict(sorted(classes.items()))


def _compared(root: Path, train: Iterable[str], val: Iterable[str]) -> list[str]:
    """A fault if the two splits have different classes."""
    different = sorted(set(train) ^ set(val))
    if not different:
        return []
    shown = ", ".join(f"{name!r} only in {'train' if name in train else 'val'}" for name in different[:3])
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    return [f"data.path: {root}: expected the same class folders in train and val; {shown}{more}"]


def _parted(names: list[str], label: str, seed: int, share: float) -> tuple[list[str], list[str]]:
    """A class's images for training and for validation, at least one in each of them if there are two.

    They are ordered by a hash of seed and name, so that an image that is added later moves few of the others.
    """
    count = min(len(names) - 1, max(1, round(share * len(names)))) if share else 0
    start = hashlib.blake2b(f"{seed}/".encode() + os.fsencode(label) + b"/")

    def position(name: str) -> bytes:
        digest = start.copy()
        digest.update(os.fsencode(name))
        return digest.digest()

    held_out = set(sorted(names, key=position)[:count])
    return [name for name in names if name not in held_out], [name for name in names if name in held_out]


def _listing(folder: Path, folders: list[str], names: list[list[str]]) -> Listing:
    """The images in these `folders` below `folder`, with the `names` of each class."""
    encoded = [os.fsencode(name) for listed in names for name in listed]
    labels = np.repeat(np.arange(len(folders), dtype=np.int32), [len(listed) for listed in names])
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return Listing(str(folder), folders, labels, b"".join(encoded), lengths.cumsum())


def _images(folder: Path, faults: list[str], left_out: Counter[str]) -> list[str]:
    """The names of the images in a class folder, sorted. It is a fault if there are none."""
    try:
        names = walk.pictures(folder, pixels.SUFFIXES, left_out)
    except OSError as error:
        faults.append(f"{folder}: cannot be read ({error.strerror}); expected a folder of images")
        return []
    if not names:
        suffixes = ", ".join(pixels.SUFFIXES)
        other = f"; if they are the classes, give data.path={folder}" if _folders(folder) else ""
        faults.append(
            f"{folder}: no images{walk.content(folder)}; expected files that end in {suffixes}, or no such folder"
            f"{other}"
        )
    return names


def _no_images(listing: Listing) -> Iterator[str]:
    """A fault for each file that is not an image by its first bytes, among files spread over all."""
    for index in spread(len(listing), _CHECKED).tolist():
        path = listing.path(index)
        try:
            with Path(path).open("rb") as file:
                start = file.read(16)
        except OSError as error:
            yield f"{path}: cannot be read ({error.strerror}); expected a JPEG or PNG image"
            continue
        if not pixels.looks_right(start):
            yield f"{path}: {pixels.no_image(path, start)}; fix or remove it, or set data.corrupt=replace"
