"""A clock that the test controls, and lines that say how training goes."""

from __future__ import annotations

import re

from hvdkit.results.train import MetricLine


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def left_s(line: str) -> float:
    found = re.search(r"\(about (\d+) (min|s) left\)$", line)
    assert found, line
    return float(found[1]) * (60 if found[2] == "min" else 1)


def line(step: int, total: int, ends_epoch: bool = True) -> MetricLine:
    return MetricLine(
        step=step, total_steps=total, epoch=0, ends_epoch=ends_epoch, loss=1.0, learning_rate=0.1, images_per_second=99
    )
