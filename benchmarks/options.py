"""What a recipe's options cost and bring: images per second and peak memory with and without each, side by side.

    .venv/bin/python benchmarks/options.py [--option recompute] [--framework pytorch] [--rounds 5]

A round runs the recipe as it is and with the option directly after each other, in random order, and gives one ratio of
each figure. Rounds that are done are kept in `runs/options`; give `--fresh` after a change of code. What a framework
cannot do is left out. Writes options.json and options.md beside itself.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

from ratios import interval, told

from hvdkit.commands import train
from hvdkit.commands.plan import make_plan
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.recipe import schema
from hvdkit.results.machine import this_machine
from hvdkit.results.train import TrainResult, read_result

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent / "recipes"
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
DIGITS = ("resnet20-digits", 2, ["threads=1", "steps=40", "warmup_steps=10", "epochs=2"])
LARGE = (
    "resnet50-synthetic",
    1,
    ["threads=2", "steps=8", "warmup_steps=3", "batch_size=32", "data.height=96", "data.width=96"],
)
FIGURES = ("images_per_second", "peak_rss_mib")
# option -> ((recipe, ranks, overrides), the option's own overrides)
OPTIONS: dict[str, tuple[tuple[str, int, list[str]], list[str]]] = {
    "recompute": (LARGE, ["recompute=true"]),
    "check_ranks: 10": (DIGITS, ["check_ranks=10"]),
    "accumulate: 4": (DIGITS, ["accumulate=4", "steps=10", "warmup_steps=3"]),
    "precision: bf16": (DIGITS, ["precision=bf16"]),
    "precision: fp16": (DIGITS, ["precision=fp16"]),
    "precision: fp64": (DIGITS, ["precision=fp64"]),
    "optimizer: adamw": (DIGITS, ["optimizer={name: adamw, learning_rate: 0.001}"]),
    "optimizer: lamb": (DIGITS, ["optimizer={name: lamb, learning_rate: 0.001}"]),
    "data.augment: crop-flip": (DIGITS, ["data.augment=crop-flip"]),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--option", action="append", choices=OPTIONS, help="only this one (may be repeated)")
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="forget rounds that are done")
    args = parser.parse_args()
    keep = Path("runs") / "options"
    if args.fresh:
        shutil.rmtree(keep, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    for option in args.option or OPTIONS:
        for framework in args.framework or FRAMEWORKS:
            folder = keep.absolute() / option.replace(": ", "-").replace(".", "-") / framework
            try:
                pairs = [measure(option, framework, folder / f"{number:02d}") for number in range(args.rounds)]
            except RequestError as error:
                print(f"{option}, {framework}: left out: {error}", flush=True)
                rows.append({"option": option, "framework": framework, "left_out": str(error).partition(": ")[2]})
                continue
            rows.append({"option": option, "framework": framework} | ratios(pairs))
            speed, memory = (told(rows[-1][key], 2) for key in FIGURES)
            print(f"{option}, {framework}: images/s {speed}, memory {memory}", flush=True)
    outcome = {"command": "python benchmarks/options.py", "rounds": args.rounds, "rows": rows}
    outcome["machine"] = this_machine().model_dump()
    write_atomic(HERE / "options.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(HERE / "options.md", page(outcome))


def measure(option: str, framework: str, folder: Path) -> dict[str, TrainResult]:
    """One round; raises RequestError where the framework cannot do it."""
    (name, np, overrides), own = OPTIONS[option]
    sides = {"without": overrides, "with": overrides + own}
    order = list(sides)
    random.Random(str(folder)).shuffle(order)
    if not all((folder / side / "result.json").exists() for side in sides):
        shutil.rmtree(folder, ignore_errors=True)  # half a round is none: its sides would be hours apart
        for side in order:
            (folder / side).mkdir(parents=True)
            recipe = schema.load(RECIPES / f"{name}.yaml", [*sides[side], "checkpoint=null"])
            plan = make_plan(recipe, framework, np, None, "direct")
            train.run(plan, folder / side)
    return {side: read_result(folder / side / "result.json") for side in sides}


def ratios(pairs: list[dict[str, TrainResult]]) -> dict[str, Any]:
    """With ÷ without."""
    return {
        key: interval([getattr(pair["with"], key) / getattr(pair["without"], key) for pair in pairs]) for key in FIGURES
    } | {"version": pairs[0]["with"].framework_version}


def page(outcome: dict[str, Any]) -> str:
    """`options.md`."""
    machine = outcome["machine"]
    lines = [
        "# What options cost and bring",
        "",
        f"With ÷ without the option: the median of {outcome['rounds']} interleaved rounds and its 95 % bootstrap "
        "interval. ResNet-20 on the digits, 2 ranks of one thread, 32 images a rank; `recompute`: ResNet-50 on "
        f"synthetic images of 96 px, one rank of two threads, 32 images. Made by `{outcome['command']}`.",
        "",
        "| option | framework | images/s | peak memory |",
        "|:---|:---|---:|---:|",
    ]
    for row in outcome["rows"]:
        if "left_out" in row:
            lines.append(f"| {row['option']} | {row['framework']} | - | - |")
            continue
        lines.append(f"| {row['option']} | {row['framework']} | {' | '.join(told(row[key], 2) for key in FIGURES)} |")
    lines += ["", "-: the framework cannot do it on a CPU.", ""]
    lines.append(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_mib']} MiB, {machine['system']}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
