"""A figure that the simulator is compared with."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Row:
    """One figure. Those `used_for` calibration went into a parameter; the others were predicted without being seen.

    `low` to `high` is the interval that the prediction came with. `linear`, `plain_sum` and `pollux` are what the
    baselines say in its place. All in `unit`.
    """

    set: str
    row: str
    unit: str
    predicted: float
    measured: float
    used_for: str
    low: float | None = None
    high: float | None = None
    linear: float | None = None
    plain_sum: float | None = None
    pollux: float | None = None

    @property
    def error_percent(self) -> float:
        """100 × (predicted − measured) / measured."""
        return 100 * (self.predicted - self.measured) / self.measured

    def written(self) -> dict[str, object]:
        """As it stands in validation.json."""
        return asdict(self) | {"error_percent": self.error_percent}
