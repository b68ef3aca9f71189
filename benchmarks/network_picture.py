"""The picture of `network.py`: step times by method, and accuracies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.starved import COMPUTE, Row, best, limit_of
from hvdkit.report import plotting


def picture(rows: list[Row], path: Path) -> None:
    """Step times by method for the first framework's shares, and speed against accuracy; a PNG at `path`.

    Raises RunError where it cannot be written.
    """
    rows = [row for row in rows if row["framework"] == rows[0]["framework"]]
    shares = list(dict.fromkeys(row["asked_share"] for row in rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    with plotting.picture(path, 5.2 * (len(shares) + 1), 5) as figure:
        *left, right = figure.subplots(1, len(shares) + 1, squeeze=False)[0]
        for axes, asked in zip(left, shares, strict=True):
            _steps(axes, [row for row in rows if row["asked_share"] == asked])
        _accuracies(right, rows)
        hosts = f"ResNet-20, mnist5k, {rows[0]['framework']}, four hosts"
        figure.suptitle(f"{hosts}; dense: uncompressed; *: the fastest that is as accurate")
        figure.tight_layout()


def _steps(axes: Any, rows: list[Row]) -> None:
    """A bar for each method at a share: computing, and the rest of its step."""
    first, chosen = rows[0], best(rows)
    names = [f"{row['method']} *" if row is chosen else row["method"] for row in rows]
    compute = [min(row["compute_ms"], row["step_ms"]) for row in rows]
    rest = [row["step_ms"] - least for row, least in zip(rows, compute, strict=True)]
    axes.barh(names, compute, color="C0", label=COMPUTE)
    axes.barh(names, rest, left=compute, color="C3", label="sending, compressing, waiting")
    for name, row in zip(names, rows, strict=True):
        text = f" {row['speedup']:.2f}×, {row['share_of_limit']:.0%}"
        axes.text(row["step_ms"], name, text, va="center", fontsize=8)
    axes.set_xlim(0, 1.3 * max(row["step_ms"] for row in rows))
    axes.set(xlabel="ms per step; times as fast, share of the limit")
    limit = f"{first['rate_mbit_per_s']:.1f} Mbit/s, limit {limit_of(first['share']):.2f}×"
    axes.set_title(f"{first['asked_share']:.0%} communication: {limit}")
    axes.invert_yaxis()
    axes.legend(loc="lower right", fontsize=8)


def _accuracies(axes: Any, rows: list[Row]) -> None:
    """Each method's range and mean, once: accuracy knows no link."""
    trained = {row["method"]: row for row in rows if row["accuracy_mean"] is not None}
    for place, row in enumerate(trained.values()):
        axes.plot([row["accuracy_low"], row["accuracy_high"]], [place, place], color="C7", lw=2)
        axes.plot(row["accuracy_mean"], place, "o", color="C2" if row["as_accurate"] else "C3")
    axes.set_yticks(range(len(trained)), list(trained))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.locator_params(axis="x", nbins=5)
    axes.set(xlabel="validation accuracy, mean and range over seeds", title="accuracy (red: lower than dense)")
