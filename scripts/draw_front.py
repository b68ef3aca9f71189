"""Draws docs/images/front.png, the README's picture, from results: speeds, predictions, and who failed.

.venv/bin/python -m scripts.draw_front
"""

from __future__ import annotations

import json
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from scripts.figures import ROOT

OUT = ROOT / "docs" / "images" / "front.png"
NAMES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras", "mxnet": "MXNet"}
RECIPES = {"resnet20-digits": ("ResNet-20", "#0072b2", "o"), "gpt-tiny": ("a small GPT", "#d55e00", "s")}
MARK = "speed ÷ Horovod over sockets, 2 ranks"
# Sets of docs/validation.json that linear scaling predicts too: name there, and here.
SETS = {
    "own hosts": "own hosts, slow links", "Horovod 2018": "Horovod's paper, 512 GPUs", "Pollux, T4": "Pollux, T4s",
    "TensorFlow 2017": "TensorFlow, K80s and P100s", "NVIDIA, ResNet-50": "NVIDIA, V100s and A100s",
}  # fmt: skip
# What `hvdkit launch -np 2 train.py` printed on 28 November 2026, its last line broken.
FAILED = """$ hvdkit launch -np 2 train.py --epochs 5
[0] epoch 1: loss 0.31
[1] Traceback (most recent call last):
[1]   File "train.py", line 12, in <module>
[1] ValueError: upside down
rank 1 on localhost failed: ValueError: upside down (ended with exit code 1 after 3.6 s);
  all ranks were ended; its log, …"""


def main() -> None:
    """Draw the picture; the figures in it are in its metadata, for tests/test_figures.py."""
    figure = Figure(figsize=(9.2, 5.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    shown = figures()
    speeds(figure.add_subplot(grid[0, 0]), shown["speeds"])
    errors(figure.add_subplot(grid[0, 1]), shown["errors"])
    failure(figure.add_subplot(grid[1, :]))
    figure.savefig(OUT, dpi=180, metadata={"Description": json.dumps(shown)})


def figures() -> dict[str, dict[str, Any]]:
    """What is shown: by recipe and framework low, median, high; by set the mean errors of hvdkit and linear scaling."""
    recipes = json.loads((ROOT / "benchmarks" / "cost.json").read_text())["recipes"]
    sets = {entry["set"]: entry for entry in json.loads((ROOT / "docs" / "validation.json").read_text())}
    speeds: dict[str, Any] = {}
    for recipe in RECIPES:
        for name in NAMES:
            marks = recipes[recipe]["frameworks"][name]["marks"]
            ratio = next(mark["ratio"] for mark in marks if mark["what"] == MARK)
            found = [round(ratio[key], 2) for key in ("low", "median", "high")]
            speeds.setdefault(recipe, {})[name] = found
    errors = {name: [round(sets[name]["mean"], 1), round(sets[name]["baselines"][0][0], 1)] for name in SETS}
    return {"speeds": speeds, "errors": errors}


def speeds(axes: Axes, recipes: dict[str, Any]) -> None:
    """hvdkit beside a script by hand: medians with intervals."""
    for shift, (recipe, (label, colour, marker)) in zip((0.15, -0.15), RECIPES.items(), strict=True):
        for place, name in enumerate(reversed(NAMES)):
            low, median, high = recipes[recipe][name]
            axes.plot((low, high), (place + shift,) * 2, color=colour, linewidth=2)
            axes.plot(median, place + shift, marker, color=colour, label=label if place == 0 else None)
    axes.axvline(1, color="#888888", linewidth=1)
    axes.set_yticks(range(len(NAMES)), list(reversed(NAMES.values())))
    axes.set(title="Compare: times as fast as a script by hand\nwith Horovod over sockets", xlim=(0.8, None))
    axes.legend(loc="upper right", frameon=False)


def errors(axes: Axes, sets: dict[str, Any]) -> None:
    """Mean errors of predictions beside those of linear scaling."""
    for place, name in enumerate(reversed(SETS)):
        mean, linear = sets[name]
        axes.barh(place + 0.2, mean, 0.36, color="#0072b2", label="hvdkit predict" if place == 0 else None)
        axes.barh(place - 0.2, linear, 0.36, color="#bbbbbb", label="linear scaling" if place == 0 else None)
        axes.text(mean + 0.7, place + 0.2, f"{mean:.1f} %", va="center", fontsize=9)
    axes.set_yticks(range(len(SETS)), list(reversed(SETS.values())))
    axes.set(title="Predict: mean error in %,\nbeside measured speeds")
    axes.legend(loc="lower right", frameon=False)


def failure(axes: Axes) -> None:
    """What a failed run says."""
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1), title="Know who failed")
    axes.add_patch(FancyBboxPatch((0.01, 0.02), 0.98, 0.96, boxstyle="round,pad=0,rounding_size=0.02", fc="#1e1e1e"))
    axes.text(0.025, 0.5, FAILED, family="monospace", color="#f0f0f0", va="center", fontsize=10, linespacing=1.35)


if __name__ == "__main__":
    main()
