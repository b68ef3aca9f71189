"""bench-network.md and its picture, from the rows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starved import COMPUTE, MARKS, Row, Story, best, limit_of

from hvdkit.files import write_atomic


def page(story: Story, missed: list[str]) -> str:
    """`bench-network.md`."""
    return "\n".join(_lines(story, missed)) + "\n"


def _lines(story: Story, missed: list[str]) -> Iterator[str]:
    setting, machine = story.setting, story.machine
    yield "# A network slower than the computers, and what helps"
    yield ""
    yield (
        f"ResNet-20 on `mnist5k`, {setting['hosts']} hosts, {setting['batch_size']} images a rank, "
        f"{setting['steps_per_epoch']} updates an epoch. Links are so slow that communication is the told share of a "
        "dense float32 step. Limit: the dense step over the step of the same four ranks when nothing is sent. Times "
        "are medians over interleaved rounds, with the least and the greatest; an epoch is without evaluation. "
        f"Accuracies are the mean over seeds and its range, after {setting['epochs']} epochs."
    )
    for framework, asked in dict.fromkeys((row.framework, row.asked_share) for row in story.rows):
        rows = [row for row in story.rows if (row.framework, row.asked_share) == (framework, asked)]
        first = rows[0]
        yield ""
        yield f"## {framework} {story.versions.get(framework, '')}: {asked:.0%} communication"
        yield ""
        yield (
            f"{first.rate_mbit_per_s:.2f} Mbit/s; achieved: {first.share:.1%}, so the limit is "
            f"{limit_of(first.share):.2f} times. Computing takes {first.compute_ms:.0f} ms."
        )
        yield ""
        yield (
            "| method | ms a step | s an epoch | times as fast | of the limit | bytes a step | accuracy | as dense "
            "| rounds | seeds |"
        )
        yield "|:---|---:|---:|---:|---:|---:|---:|:---|---:|---:|"
        for row in rows:
            yield _line(row)
    yield ""
    yield "| method | what is sent |"
    yield "|:---|:---|"
    for name, says in story.methods.items():
        yield f"| {name} | {says} |"
    yield ""
    marks = ", ".join(f"{mark:.0%} of the limit at {share:.0%}" for share, mark in MARKS.items())
    verdict = "; ".join(missed) if missed else "met by the fastest method that is as accurate as dense"
    yield f"Marks: {marks}: {verdict}. As accurate: a mean within 0.01 of dense's, or not below dense's range."
    yield ""
    load = "" if story.load is None else f" Others took at most {story.load:.0%} of its time from a run."
    told = f"{machine['processor']}, {machine['cores']} cores, {machine['system']}"
    yield f"{told}.{load} Measured on {story.measured} by `{story.command}`."


def _line(row: Row) -> str:
    accuracy = "not trained"
    if row.accuracy_mean is not None:
        accuracy = f"{row.accuracy_mean:.4f} ({row.accuracy_low:.4f}–{row.accuracy_high:.4f})"
    verdict = {None: "", True: "yes", False: "no"}[row.as_accurate]
    return (
        f"| {row.method} | {row.step_ms:.0f} ({row.step_ms_low:.0f}–{row.step_ms_high:.0f}) | {row.epoch_s:.1f} | "
        f"{row.speedup:.2f} | {row.share_of_limit:.3f} ({row.share_of_limit_low:.3f}–{row.share_of_limit_high:.3f}) | "
        f"{row.bytes_per_step:,.0f} | {accuracy} | {verdict} | {row.rounds} | {row.seeds} |"
    )


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
