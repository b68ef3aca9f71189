"""Images that tests draw, and digests of what the data side makes of them; as a script it prints these, beside one
framework after the other: `python pictures.py FRAMEWORK... FOLDER CIFAR`."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from hvdkit import adapters
from hvdkit.data import batches as data
from hvdkit.recipe.schema import Cifar10, ImageFolder, Mnist5k

CLASSES = ("cat", "dog", "Übel")


def draw_folder(root: Path, per_class: int = 8, side: int = 60) -> Path:
    """A folder as ImageNet lies on disk: smooth pictures of three classes, JPEG and PNG, upright and lying."""
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", per_class), ("val", max(1, per_class // 4))):
        for name in CLASSES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
                size = (side + 7 * number, side + 3) if number % 2 else (side, side + 11 * number)
                picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
                picture.save(folder / (f"{number:03}.png" if number % 3 == 2 else f"{number:03}.JPEG"))
    return root


def write_cifar(folder: Path) -> Path:
    """Six files of CIFAR-10's binary version; record k has the label k % 10 and pixels that tell k and the place."""
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        records = np.empty((10_000, 3073), np.uint8)
        records[:, 0] = np.arange(10_000) % 10
        records[:, 1:] = (np.arange(10_000)[:, None] * 7 + np.arange(3072) * 3 + number) % 251
        records.tofile(folder / name)
    return folder


def digests(folder: Path, cifar: Path | None = None, workers: int = 2, ranks: int = 1) -> dict[str, str]:
    """SHA-256 of all bytes by data set: two epochs and an evaluation, of all ranks in turn for each batch."""
    recipes = {
        "imagefolder": (ImageFolder(name="imagefolder", path=str(folder), size=48, resize=56, workers=workers), 3),
        "mnist5k": (Mnist5k(name="mnist5k", augment="crop-flip"), 10),
    }
    if cifar:
        recipes["cifar10"] = (Cifar10(name="cifar10", path=str(cifar), augment="crop-flip"), 10)
    found = {}
    for name, (kind, classes) in recipes.items():
        dataset = data.open_dataset(kind, classes, 1)
        total = hashlib.sha256()
        for epoch in range(2):
            shards = [
                data.epoch_batches(dataset.train, 12 // ranks, 1, epoch, rank, ranks, kind.augment)
                for rank in range(ranks)
            ]
            for number, batches in enumerate(zip(*shards, strict=True)):
                if number == 20:
                    break
                total.update(np.concatenate([batch.inputs for batch in batches]).tobytes())
                total.update(np.concatenate([batch.targets for batch in batches]).tobytes())
        batch = dataset.val.batch(np.arange(min(50, len(dataset.val))))
        total.update(batch.inputs.tobytes() + batch.targets.tobytes())
        found[name] = total.hexdigest()
    return found


if __name__ == "__main__":
    found, (*frameworks, folder, cifar) = {}, sys.argv[1:]
    for framework in frameworks:
        adapters.load(framework)  # frameworks bring libraries for images of their own
        found[framework] = digests(Path(folder), Path(cifar))
    print("\n" + json.dumps(found))
