"""Predictions and advice as lines of text."""

from __future__ import annotations

from hvdkit.simulator.predict import Point, Prediction


def prediction_lines(prediction: Prediction) -> list[str]:
    """A line for each number of ranks, then what is told of them."""
    lines = [f"{prediction.model} on {prediction.cluster}, from a profile of {prediction.profile}"]
    lines += [point_line(point) for point in prediction.points]
    warned: dict[str, list[int]] = {}
    for point in prediction.points:
        for warning in point.warnings:
            warned.setdefault(warning, []).append(point.ranks)
    lines += [f"note ({', '.join(map(str, ranks))} ranks): {warning}" for warning, ranks in warned.items()]
    return lines


def point_line(point: Point) -> str:
    """One number of ranks in a line."""
    return (
        f"{point.ranks:>7} ranks: {point.step_ms:.1f} ms a step ({point.low_ms:.1f} to {point.high_ms:.1f}), "
        f"{point.images_per_second:,.0f} images/s, efficiency {100 * point.efficiency:.1f} %, "
        f"{point.exposed_communication_ms:.1f} ms exposed communication, bound by {point.bound}"
    )
