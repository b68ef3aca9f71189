"""The ways to train a recipe on a cluster, as a table and lines."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hvdkit.report.tabular import Cell, Table, number
from hvdkit.results.ladder import Ladder, Rung


def title(ladder: Ladder) -> str:
    """What is planned."""
    size = "" if ladder.device_bytes is None else f" of {_gib(ladder.device_bytes)} GiB"
    ranks = f"{ladder.ranks} rank{'s' if ladder.ranks > 1 else ''}"
    return (
        f"{ladder.recipe}: {ladder.model}, {ladder.parameters:,} parameters, {ladder.samples_per_update:,} samples an "
        f"update, under {ladder.framework}; {ranks} on {ladder.cluster}, {ladder.device}{size}"
    )


def table(ladder: Ladder) -> Table:
    """A row for each rung."""
    room = "" if ladder.room_bytes is None else f" of {_gib(ladder.room_bytes)}"
    return Table.of(
        "plan",
        ladder.rungs,
        {
            "strategy": _name,
            "batch × accumulate × ranks": lambda rung: Cell(
                f"{rung.batch_size} × {rung.accumulate} × {rung.data_ranks}" if rung.parts else "–"
            ),
            f"GiB{room}": _memory,
            "update, ms": _step,
            "samples/s": lambda rung: number(rung.samples_per_second),
            "verdict": lambda rung: rung.why,
        },
    ).without_empty(["update, ms", "samples/s"])


def sentences(ladder: Ladder) -> Iterator[str]:
    """What was chosen, its memory by part, and how it is trained."""
    rung = ladder.chosen
    if rung is None:
        least = min((one for one in ladder.rungs if one.total_bytes), key=lambda one: one.total_bytes or 0)
        yield (
            f"nothing fits on {ladder.ranks} ranks: {least.name} needs the least, {_gib(least.total_bytes or 0)} GiB; "
            "take more ranks, devices with more memory, or a smaller model"
        )
    elif rung.parts:
        parts = ", ".join(f"{name} {value / 2**30:,.2f}" for name, value in rung.parts if value)
        yield f"{rung.name}: GiB of the rank with the most: {parts}"
        keys = " ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in rung.changes.items()
        )
        changed = f"give `hvdkit train` {keys} too, or have the recipe written by --new-recipe NEW.yaml" if keys else ""
        yield f"{rung.name}: {changed or 'nothing of the recipe changes'}"
    yield from ladder.notes


def _name(rung: Rung) -> str:
    axes = [
        f"{axis} {rung.changes[key]}" for axis in ("pipeline", "tensor") if (key := f"parallel.{axis}") in rung.changes
    ]
    more = [*axes, *(["recompute"] if rung.changes.get("recompute") and rung.name != "recompute" else [])]
    return f"{'>' if rung.chosen else ' '} {rung.name}" + (f" ({', '.join(more)})" if more else "")


def _memory(rung: Rung) -> Cell:
    return number(None) if rung.total_bytes is None else Cell(_gib(rung.total_bytes), bad=rung.fits is False)


def _step(rung: Rung) -> Cell:
    if rung.step_ms is None:
        return number(None)
    return Cell(f"{rung.step_ms:,.0f} ({rung.low_ms:,.0f} to {rung.high_ms:,.0f})", rung.step_ms)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f}"
