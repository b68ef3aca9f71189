"""Does the input keep up? Images per second that the data side delivers, and that each framework consumes, in turn.

    .venv/bin/python benchmarks/data.py [--data imagefolder] [--framework pytorch] [--rounds 5]

Folders of JPEG files (500×375, drawn) at 224 px against ResNet-50, digits and CIFAR-10 (random pixels) against
ResNet-20, with the training changes of each, by one thread either way and one after the other. Also how long a listing
of 100,000 files takes. Rounds that are done are kept in `runs/data`; give `--fresh` after a change of code. Writes
data.json and data.md beside itself.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import commands
import numpy as np
from ratios import interval, told

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent / "recipes"
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
PICTURES, LISTED, MARK = 256, 100_000, 1.5
TIMEOUT_S = 300.0
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
    """The command line: the driver, and with `--deliver` or `--list` the part that runs in a runtime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", choices=KINDS, help="only this one (may be repeated)")
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="forget rounds that are done")
    parser.add_argument("--deliver", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "data", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.deliver or args.list:
        found = listed(args.folder) if args.list else {"images_per_second": delivered(args.deliver, args.folder)}
        print("\n" + json.dumps(found), flush=True)
        return
    from hvdkit.files import write_atomic
    from hvdkit.results.machine import this_machine

    keep = args.folder.absolute()
    if args.fresh:
        shutil.rmtree(keep, ignore_errors=True)
    draw(keep / "files")
    kinds, frameworks = args.data or list(KINDS), args.framework or list(FRAMEWORKS)
    for number in range(args.rounds):
        for kind in kinds:
            for framework in frameworks:
                measure(kind, framework, keep, number)
    rows = [row(kind, framework, keep, args.rounds) for kind in kinds for framework in frameworks]
    listing = in_runtime("pytorch", "--list", keep / "files")
    outcome: dict[str, Any] = {"command": "python benchmarks/data.py", "rounds": args.rounds, "rows": rows}
    outcome |= {"listing": listing, "versions": versions(), "machine": this_machine().model_dump()}
    write_atomic(HERE / "data.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(HERE / "data.md", page(outcome))


def draw(folder: Path) -> None:
    """Photograph-like JPEG files of about 110 KB, CIFAR's files with random pixels, and many empty files to list."""
    if folder.exists():
        return
    from PIL import Image

    made = folder.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    numbers = np.random.default_rng(0)
    for split, count in (("train", PICTURES), ("val", 2)):
        for index in range(count):
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
    for label in range(100):
        for split, count in (("train", LISTED // 100), ("val", 1)):
            place = made / "many" / split / f"n{label:08}"
            place.mkdir(parents=True)
            for index in range(count):
                (place / f"n{label:08}_{index}.JPEG").touch()
    made.replace(folder)


def delivered(kind: str, folder: Path, seconds: float = 5) -> float:
    """Images per second of training batches that nobody uses, behind two seconds of warm-up."""
    from hvdkit.data.batches import epoch_batches, open_dataset
    from hvdkit.recipe.schema import Cifar10, Digits, ImageFolder

    wanted: Digits | Cifar10 | ImageFolder = {
        "digits": Digits(name="digits", augment="crop-flip"),
        "cifar10": Cifar10(name="cifar10", path=str(folder / "cifar"), augment="crop-flip"),
        "imagefolder": ImageFolder(name="imagefolder", path=str(folder / "pictures"), workers=1),
    }[kind]
    size = KINDS[kind][2]
    dataset = open_dataset(wanted, 10, 1)
    begun, images, started = time.perf_counter(), 0, 0.0
    for epoch in range(1_000_000):
        for _ in epoch_batches(dataset.train, size, 1, epoch, 0, 1, wanted.augment):
            now = time.perf_counter()
            if started:
                images += size
            elif now > begun + 2:
                started = now
            if started and now > started + seconds:
                return images / (now - started)
    raise AssertionError("unreachable")


def listed(folder: Path) -> dict[str, float]:
    """How long `open_dataset` takes over the empty files, and how much memory it adds at its peak."""
    from hvdkit.data.batches import open_dataset
    from hvdkit.recipe.schema import ImageFolder

    kind = ImageFolder(name="imagefolder", path=str(folder / "many"), corrupt="replace")
    before, started = _peak_mib(), time.perf_counter()
    dataset = open_dataset(kind, 100, 1)
    taken = time.perf_counter() - started
    return {"files": len(dataset.train), "seconds": taken, "added_mib": _peak_mib() - before}


def _peak_mib() -> float:
    """This process's largest resident memory; getrusage's begins with that of the process that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(kind: str, framework: str, keep: Path, number: int) -> dict[str, float]:
    """One round: what is delivered and what is consumed, images per second, in random order."""
    from hvdkit.files import write_atomic

    file = keep / kind / framework / f"{number:02d}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    sides = ["delivered", "consumed"]
    random.Random(str((kind, framework, number))).shuffle(sides)
    found: dict[str, float] = {}
    for side in sides:
        if side == "delivered":
            answer = in_runtime(framework, "--deliver", kind, keep / "files")
            found[side] = answer["images_per_second"]
        else:
            found[side] = consumed(kind, framework, file.with_suffix(""))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(found) + "\n")
    print(f"round {number + 1}, {kind}, {framework}: {found}", flush=True)
    return found


def in_runtime(framework: str, *arguments: str | Path) -> dict[str, Any]:
    """What this script answers in the framework's runtime; the last argument is the folder of files."""
    from hvdkit.runtimes.store import find

    command = [find(framework).python, __file__, *arguments[:-1], "--folder", arguments[-1]]
    return dict(commands.answer([str(word) for word in command], TIMEOUT_S))


def consumed(kind: str, framework: str, folder: Path) -> float:
    """Images per second of training on one rank of one thread, its batches ready in memory."""
    from hvdkit.commands import train
    from hvdkit.commands.plan import make_plan
    from hvdkit.recipe import schema

    recipe, overrides, _ = KINDS[kind]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plan = make_plan(
        schema.load(RECIPES / f"{recipe}.yaml", [*overrides, "checkpoint=null"]), framework, 1, None, "direct", 0.0
    )
    return train.run(plan, folder).images_per_second


def row(kind: str, framework: str, keep: Path, rounds: int) -> dict[str, Any]:
    """The medians of a pair, and of the rounds' ratios."""
    found = [measure(kind, framework, keep, number) for number in range(rounds)]
    medians = {side: float(np.median([each[side] for each in found])) for side in ("delivered", "consumed")}
    ratio = interval([each["delivered"] / each["consumed"] for each in found])
    return {"data": kind, "framework": framework} | medians | {"ratio": ratio}


def versions() -> dict[str, str]:
    """Of what reads images, and of the frameworks, as the runtimes are pinned."""
    from hvdkit.runtimes import pins
    from hvdkit.runtimes.store import find

    wanted = [pin for pin in pins.RUNTIMES["pytorch"].packages(False) if pin.startswith(("Pillow", "grain"))]
    found = dict(pin.split("==") for pin in wanted)
    return found | {name: find(name).versions[pins.RUNTIMES[name].module] for name in pins.RUNTIMES}


def page(outcome: dict[str, Any]) -> str:
    """`data.md`."""
    machine, listing = outcome["machine"], outcome["listing"]
    lines = [
        "# Does the input keep up?",
        "",
        "Images per second of training batches that the data side makes when nobody uses them, and that one rank "
        "consumes when they lie ready in memory, one thread each: medians of "
        f"{outcome['rounds']} interleaved rounds, the ratio with its 95 % bootstrap interval. JPEG files of 500×375 "
        "pixels and about 110 KB by random crops of 224 px against ResNet-50 (batches of 8), digits and CIFAR-10 by "
        f"crops and flips against ResNet-20 (batches of 32). Wanted: {MARK}. Made by `{outcome['command']}`.",
        "",
        "| data | framework | delivered | consumed | ratio |",
        "|:---|:---|---:|---:|---:|",
    ]
    for each in outcome["rows"]:
        shown = told(each["ratio"], 1)
        lines.append(
            f"| {each['data']} | {each['framework']} | {each['delivered']:.0f} | {each['consumed']:.1f} | {shown} |"
        )
    used = ", ".join(f"{name} {version}" for name, version in outcome["versions"].items())
    lines += [
        "",
        f"Listing {listing['files']:,} files in 100 folders took {listing['seconds']:.2f} s and "
        f"{listing['added_mib']:.0f} MiB more at the peak.",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_mib']} MiB, {machine['system']}; {used}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
