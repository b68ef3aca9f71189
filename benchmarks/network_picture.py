"""The picture of `network.py`: step times by method, and accuracies."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from starved import COMPUTE, Row, Story, best, limit_of

from hvdkit.files import write_atomic


def picture(story: Story, path: Path) -> None:
    """Step times by method for the first framework's shares, and speed against accuracy; a PNG at `path`.

    Raises RunError where it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    framework = story.rows[0].framework
    shares = list(dict.fromkeys(row.asked_share for row in story.rows if row.framework == framework))
    figure, axes = pyplot.subplots(1, len(shares) + 1, figsize=(5.2 * (len(shares) + 1), 5), squeeze=False)
    for place, asked in enumerate(shares):
        rows = [row for row in story.rows if (row.framework, row.asked_share) == (framework, asked)]
        bars, chosen = axes[0][place], best(rows, framework, asked)
        names = [f"{row.method} *" if row is chosen else row.method for row in rows]
        compute = [min(row.compute_ms, row.step_ms) for row in rows]
        rest = [row.step_ms - least for row, least in zip(rows, compute, strict=True)]
        bars.barh(names, compute, color="C0", label=COMPUTE)
        bars.barh(names, rest, left=compute, color="C3", label="sending, compressing, waiting")
        for row in rows:
            name = names[rows.index(row)]
            bars.text(row.step_ms, name, f" {row.speedup:.2f}×, {row.share_of_limit:.0%}", va="center", fontsize=8)
        bars.set_xlim(0, 1.3 * max(row.step_ms for row in rows))
        bars.set(xlabel="ms a step; times as fast, share of the limit")
        bars.set_title(
            f"{asked:.0%} communication: {rows[0].rate_mbit_per_s:.1f} Mbit/s, limit {limit_of(rows[0].share):.2f}×"
        )
        bars.invert_yaxis()
        bars.legend(loc="lower right", fontsize=8)
    _accuracies(axes[0][-1], [row for row in story.rows if row.framework == framework])
    figure.suptitle(f"ResNet-20, mnist5k, {framework}, four hosts; *: the fastest that is as accurate as dense")
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    pyplot.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())


def _accuracies(axes: Any, rows: list[Row]) -> None:
    """Each method's range and mean, once: accuracy knows no link."""
    trained = {row.method: row for row in rows if row.accuracy_mean is not None}
    for place, row in enumerate(trained.values()):
        axes.plot([row.accuracy_low, row.accuracy_high], [place, place], color="C7", lw=2)
        axes.plot(row.accuracy_mean, place, "o", color="C2" if row.as_accurate else "C3")
    axes.set_yticks(range(len(trained)), list(trained))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.locator_params(axis="x", nbins=5)
    axes.set(xlabel="validation accuracy, mean and range over seeds", title="accuracy (red: not as dense)")
