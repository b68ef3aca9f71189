"""The picture of `sharding.py`: memory by part and stage beside the measured peak, and the price in speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.report import plotting

WIDTH = 0.38  # of a bar; two stand beside each other


def picture(outcome: Mapping[str, Any], path: Path) -> None:
    """Write a PNG at `path`. Raises RunError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plotting.picture(path, 13, 4.8) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
        _memory(left, outcome)
        _price(right, outcome["speed"])
        figure.tight_layout()


def _memory(axes: Any, outcome: Mapping[str, Any]) -> None:
    """A stack of what is counted for each stage, beside it a bar of what was measured."""
    ranks = max(row["ranks"] for row in outcome["memory"])
    rows = [row for row in outcome["memory"] if row["ranks"] == ranks]
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for number, part in enumerate(rows[0]["counted_mib"]):
        sizes = [row["counted_mib"][part] for row in rows]
        axes.bar([place - WIDTH / 2 for place in places], sizes, WIDTH, bottom=bottom, color=f"C{number}", label=part)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    peaks = [row["peak_rss_mib"] for row in rows]
    axes.bar([place + WIDTH / 2 for place in places], peaks, WIDTH, color="0.75", label="measured peak")
    for place, each in zip(places, peaks, strict=True):
        axes.text(place + WIDTH / 2, each, f"{each:,.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(places, [row["stage"] for row in rows])
    axes.set(ylabel="MiB of a rank", title=f"GPT-2, AdamW, fp32, {ranks} ranks: counted by part, measured")
    axes.set_ylim(0, 1.45 * max(*peaks, *bottom))  # room for the legend
    axes.legend(fontsize=8, ncols=3, loc="upper left")


def _price(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Each stage's speed to that without sharding, with its interval, by framework and model."""
    groups = list(dict.fromkeys((row["framework"], row["model"]) for row in rows))
    stages = [stage for stage in dict.fromkeys(row["stage"] for row in rows) if stage != "none"]
    stages.sort(key=["optimizer", "gradients", "parameters"].index)
    width = 0.8 / len(stages)
    for number, stage in enumerate(stages):
        mine = [(groups.index((row["framework"], row["model"])), row["ratio"]) for row in rows if row["stage"] == stage]
        places = [place + (number - (len(stages) - 1) / 2) * width for place, _ in mine]
        middles = [ratio["median"] for _, ratio in mine]
        below = [ratio["median"] - ratio["low"] for _, ratio in mine]
        above = [ratio["high"] - ratio["median"] for _, ratio in mine]
        axes.bar(places, middles, width, yerr=[below, above], capsize=2, label=f"sharding: {stage}")
    axes.axhline(1.0, color="0.4", lw=1)
    axes.set_xticks(range(len(groups)), [f"{framework}\n{model}" for framework, model in groups], fontsize=8)
    axes.set(ylabel="tokens/s ÷ without sharding", title="Speed at 2 ranks on one machine, median and 95 % interval")
    axes.set_ylim(0, 1.35)
    axes.legend(fontsize=8, ncols=len(stages), loc="upper left")
