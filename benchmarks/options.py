"""What a recipe's options cost and bring: images per second and peak memory with and without each, side by side.

    .venv/bin/python -m benchmarks.options [--option recompute] [--framework pytorch] [--rounds 5]

A round runs the recipe as it is and with the option directly after each other, in random order, and gives one ratio of
each figure. Rounds that are done are kept in `runs/options`; give `--fresh` after a change of code. What a framework
cannot do is left out. Writes options.json and options.md beside itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import harness
from hvdkit.errors import RequestError

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
    **{f"precision: {name}": (DIGITS, [f"precision={name}"]) for name in ("bf16", "fp16", "fp64")},
    **{
        f"optimizer: {name}": (DIGITS, [f"optimizer={{name: {name}, learning_rate: 0.001}}"])
        for name in ("adamw", "lamb")
    },
    "data.augment: crop-flip": (DIGITS, ["data.augment=crop-flip"]),
}


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__, rounds=3, keep="options", frameworks=True)
    parser.add_argument("--option", action="append", choices=OPTIONS, help="only this one (may be repeated)")
    args = parser.parse_args()
    keep = harness.kept(args)
    rows = [
        {"option": option, "framework": framework} | measure(option, framework, keep, args.rounds)
        for option in args.option or OPTIONS
        for framework in args.framework or harness.FRAMEWORKS
    ]
    harness.publish("options", {"rounds": args.rounds, "rows": rows}, args.out)


def measure(option: str, framework: str, keep: Path, rounds: int) -> dict[str, Any]:
    """With ÷ without the option, of each figure; or why the framework cannot do it."""
    (recipe, ranks, keys), own = OPTIONS[option]
    sides = {"without": keys, "with": keys + own}

    def run(_: str, number: int, side: str, folder: Path) -> dict[str, Any]:
        return harness.train(framework, ranks, recipe, sides[side], folder)

    place = keep / option.replace(": ", "-").replace(".", "-")
    try:
        pairs = harness.rounds(place, [framework], list(sides), rounds, run)[framework]
    except RequestError as error:
        harness.say(f"{option}, {framework}: left out: {error}")
        return {"left_out": str(error).partition(": ")[2] or str(error)}
    found = {key: harness.interval([pair["with"][key] / pair["without"][key] for pair in pairs]) for key in FIGURES}
    return found | {"version": pairs[0]["with"]["framework_version"]}


if __name__ == "__main__":
    harness.exit_with(main)
