"""The result of `hvdkit bench links` as a table and as `links.png`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from hvdkit.report import plotting
from hvdkit.report.tabular import Cell, Of, Table, number, percent
from hvdkit.results.links import LinkRow, Links

_MOST_NUMBERS = 16  # hosts up to which each field of a heat map has its figure


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _share(rows: list[LinkRow]) -> float | None:
    rated, rate = _median(row.rated_mbit_per_s for row in rows), _median(row.mbit_per_s for row in rows)
    return rate / rated if rate is not None and rated else None


def _rated(rows: list[LinkRow]) -> Cell:
    rated = _median(row.rated_mbit_per_s for row in rows)
    return Cell("unknown") if rated is None else number(rated)


def links_table(result: Links) -> Table:
    """A row for each direction of a link: medians over the rounds, and the least and the most that it carried."""
    columns: dict[str, Of[list[LinkRow]]] = {
        "from": lambda rows: rows[0].source,
        "to": lambda rows: rows[0].target,
        "round trip µs": lambda rows: number(_median(row.latency_us for row in rows), 0),
        "p95": lambda rows: number(_median(row.latency_p95_us for row in rows), 0),
        "Mbit/s": lambda rows: number(_median(row.mbit_per_s for row in rows), 1),
        "least": lambda rows: number(min((row.low_mbit_per_s for row in rows if row.low_mbit_per_s), default=None), 1),
        "most": lambda rows: number(max((row.high_mbit_per_s for row in rows if row.high_mbit_per_s), default=None), 1),
        "rated": lambda rows: _rated(rows),
        "of it": lambda rows: percent(_share(rows)),
    }
    return Table.of("links", result.by_link().values(), columns)


def links_plot(result: Links, path: Path) -> None:
    """Draw latency and bandwidth of each pair as heat maps; of several rounds, rates by time. Raises RunError."""
    series, hosts = result.rounds > 1, result.hosts
    rated = _median(row.rated_mbit_per_s for row in result.rows)
    with plotting.picture(path, 13, 10 if series else 5.5, "constrained") as figure:
        grid = figure.add_gridspec(2 if series else 1, 2)
        figures = (("latency_us", "round trip, µs", "viridis"), ("mbit_per_s", "bandwidth, Mbit/s", "viridis_r"))
        for column, (key, title, colours) in enumerate(figures):
            axes = figure.add_subplot(grid[0, column])
            medians = {link: _median(getattr(row, key) for row in rows) for link, rows in result.by_link().items()}
            cells = [[medians.get((source, target)) for target in hosts] for source in hosts]
            drawn = axes.imshow([[float("nan") if c is None else c for c in row] for row in cells], cmap=colours)
            figure.colorbar(drawn, ax=axes)
            axes.set(title=title, xlabel="to", ylabel="from")
            axes.set_xticks(range(len(hosts)), hosts, rotation=90 if len(hosts) > _MOST_NUMBERS / 2 else 0)
            axes.set_yticks(range(len(hosts)), hosts)
            for y, row in enumerate(cells if len(hosts) <= _MOST_NUMBERS else []):
                for x, cell in enumerate(row):
                    box = {"facecolor": "white", "alpha": 0.7, "lw": 0}
                    axes.text(x, y, "–" if cell is None else f"{cell:.4g}", ha="center", va="center", bbox=box)
        if series:
            axes = figure.add_subplot(grid[1, :])
            began = result.rows[0].at_s
            for (source, target), rows in result.by_link().items():
                rates = [float("nan") if row.mbit_per_s is None else row.mbit_per_s for row in rows]
                axes.plot([(row.at_s - began) / 3600 for row in rows], rates, ".-", label=f"{source} to {target}")
            axes.set(title="bandwidth, Mbit/s", xlabel=f"hours since {time.strftime('%F %R', time.localtime(began))}")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if len(result.by_link()) <= _MOST_NUMBERS:
                axes.legend(fontsize="small", ncols=2)
        figure.suptitle(f"links between {len(hosts)} hosts, rated {f'{rated:g} Mbit/s' if rated else 'unknown'}")
