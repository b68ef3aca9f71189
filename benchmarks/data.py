"""Does the input keep up? Images per second that the data side delivers, and that each framework consumes, in turn.

    .venv/bin/python -m benchmarks.data [--data imagefolder] [--framework pytorch] [--rounds 5]

Folders of JPEG files (500×375, drawn) at 224 px against ResNet-50, digits and CIFAR-10 (random pixels) against
ResNet-20, with the training changes of each, by one thread either way and one after the other. Rounds that are done
are kept in `runs/data`; give `--fresh` after a change of code. Writes data.json and data.md beside itself.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, written

PICTURES, MARK = 256, 1.5
# data -> (recipe that consumes it, its overrides, images a batch)
SMALL = ("resnet20-digits", ["steps=25", "warmup_steps=10", "threads=1"], 32)
KINDS: dict[str, tuple[str, list[str], int]] = {
    "imagefolder": (
        "resnet50-synthetic",
        ["batch_size=8", "steps=4", "warmup_steps=1", "data.val_images=0", "threads=1"],
        8,
    ),
    "digits": SMALL,
    "cifar10": SMALL,
}


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__, rounds=3, keep="data", frameworks=True)
    parser.add_argument("--data", action="append", choices=KINDS, help="only this one (may be repeated)")
    args = parser.parse_args()
    keep = harness.kept(args)
    draw(keep / "files")
    pairs = [f"{kind}/{name}" for kind in args.data or KINDS for name in args.framework or harness.FRAMEWORKS]
    found = harness.rounds(keep, pairs, ("delivered", "consumed"), args.rounds, partial(measure, keep / "files"))
    rows = [row(*pair.split("/"), found[pair]) for pair in pairs]
    outcome = {"mark": MARK, "rounds": args.rounds, "rows": rows, "versions": versions()}
    written.publish("data", outcome, args.out)


def draw(folder: Path) -> None:
    """Photograph-like JPEG files of about 110 KB, and CIFAR's files with random pixels."""
    if folder.exists():
        return
    from PIL import Image

    made = folder.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    numbers = np.random.default_rng(0)
    for split, number in (("train", PICTURES), ("val", 2)):
        for index in range(number):
            place = made / "pictures" / split / "ab"[index % 2]
            place.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(numbers.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(int)
            grained = np.clip(smooth + numbers.integers(-16, 17, smooth.shape), 0, 255).astype(np.uint8)
            Image.fromarray(grained).save(place / f"{index:04}.jpg", quality=95)
    (made / "cifar").mkdir()
    for name in (*(f"data_batch_{index}.bin" for index in range(1, 6)), "test_batch.bin"):
        records = numbers.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(made / "cifar" / name)
    made.replace(folder)


def delivered(kind: str, folder: str, seconds: float = 5) -> float:
    """Images per second of training batches that nobody uses, after two seconds of warm-up."""
    from hvdkit.data.batches import epoch_batches, open_dataset
    from hvdkit.recipe.schema import Cifar10, Digits, ImageFolder

    wanted: Digits | Cifar10 | ImageFolder = {
        "digits": Digits(name="digits", augment="crop-flip"),
        "cifar10": Cifar10(name="cifar10", path=f"{folder}/cifar", augment="crop-flip"),
        "imagefolder": ImageFolder(name="imagefolder", path=f"{folder}/pictures", workers=1),
    }[kind]
    size, dataset = KINDS[kind][2], open_dataset(wanted, 10, 1)
    epochs = (epoch_batches(dataset.train, size, 1, epoch, 0, 1, wanted.augment) for epoch in count())
    batches = chain.from_iterable(epochs)

    def rate(least: float) -> float:
        begun, images = time.perf_counter(), 0
        while (taken := time.perf_counter() - begun) < least:
            next(batches)
            images += size
        return images / taken

    rate(2)
    return rate(seconds)


def measure(files: Path, pair: str, _: int, side: str, folder: Path) -> float:
    """What is delivered, or what one rank of one thread consumes, in images per second."""
    kind, framework = pair.split("/")
    if side == "delivered":
        return float(harness.elsewhere(delivered, framework, kind=kind, folder=str(files)))
    recipe, keys, _size = KINDS[kind]
    result = harness.train(framework, 1, recipe, keys, folder, ["--stall-timeout", "0"])
    return float(result["images_per_second"])


def row(kind: str, framework: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """The medians of a pair, and of the rounds' ratios."""
    medians = {side: float(np.median([each[side] for each in found])) for side in ("delivered", "consumed")}
    ratio = harness.interval([each["delivered"] / each["consumed"] for each in found])
    return {"data": kind, "framework": framework} | medians | {"ratio": ratio}


def versions() -> dict[str, str]:
    """Of what reads images, and of the frameworks, as the runtimes are pinned."""
    from hvdkit.runtimes import pins
    from hvdkit.runtimes.store import find

    wanted = [pin for pin in pins.RUNTIMES["pytorch"].packages(False) if pin.startswith(("Pillow", "grain"))]
    found = dict(pin.split("==") for pin in wanted)
    return found | {name: find(name).versions[pins.RUNTIMES[name].module] for name in pins.RUNTIMES}


if __name__ == "__main__":
    harness.exit_with(main)
