"""All that the simulator is compared with: docs/validation.md, docs/validation.json with the errors of each set, and
every row in benchmarks/validation.md.

make validate        (or: .venv/bin/python -m benchmarks.validate --rows rows.csv, which writes every row too)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from benchmarks import anchored, batch_sizes_rows, filled_hosts_rows, harness, mesh_rows, own_hosts_rows, written
from benchmarks.anchored import Row
from benchmarks.validation_sets import all_rows
from hvdkit.files import write_atomic
from hvdkit.report import csv_files

BASELINES = {"linear": "linear scaling", "plain_sum": "plain sum", "pollux": "Pollux"}
COVERED = 0.9  # of measured values that an interval shall hold
CURVES = {"OSU, 10GbE", "Gloo, 40GbE"}
# Too many rows, or too equal, to be listed one by one.
OMITTED = {"closed forms", "OSU, 10GbE", "Gloo, 40GbE", own_hosts_rows.FITTED, mesh_rows.VTRAIN}


def main() -> None:
    """Write the three files."""
    parser = harness.parser(__doc__, out=harness.HERE.parent)
    parser.add_argument("--rows", type=Path, help="a CSV file for every row")
    args = parser.parse_args()
    out, rows = args.out, list(all_rows())
    if args.rows:
        csv_files.save(args.rows, [asdict(row) | {"error_percent": row.error_percent} for row in rows])
    sets: dict[str, list[Row]] = {}
    for row in rows:
        if row.used_for == "validation":
            sets.setdefault(row.set, []).append(row)
    summaries = [summary(name, checked) for name, checked in sets.items()]
    wrong, pairs = own_hosts_rows.disordered(rows)
    left = left_out(sets)
    found = {
        "sets": summaries,
        "wrong": wrong,
        "pairs": pairs,
        "baselines": BASELINES,
        "omitted": OMITTED,
        "left_out": left,
        "hits": round(sum(one["inside"] * one["rows"] for one in left)),
        "layers": batch_sizes_rows.layers(),
        "crowded": filled_hosts_rows.left_out(),
        "unseen": unseen(rows),
        "behind": [one for one in summaries if 0 < one["baselines"][1][0] < one["mean"]],
    }
    short = [one | {"rows": len(one["rows"])} for one in summaries]
    files = {
        out / "docs" / "validation.md": written.page("validation", found),
        out / "docs" / "validation.json": written.text_of(short) + "\n",
        out / "benchmarks" / "validation.md": written.page("validation-rows", found),
    }
    for path, text in files.items():
        write_atomic(path, text)
    for one in summaries:
        print(f"{one['set']}: {len(one['rows'])} rows, mean error {one['mean']:.1f} %, worst {one['worst']:.1f} %")
    print(f"written to {', '.join(map(str, files))}")


def summary(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of a set in percent, how many rows lie inside their intervals, and the baselines' mean errors and rows."""
    errors = [abs(row.error_percent) for row in rows]
    inside = [row.low <= row.measured <= row.high for row in rows if row.low is not None and row.high is not None]
    given = [
        [abs(value / row.measured - 1) for row in rows if (value := getattr(row, each)) is not None]
        for each in BASELINES
    ]
    return {
        "set": name,
        "rows": rows,
        "mean": fmean(errors),
        "geometric": math.exp(fmean(math.log(max(error, 1e-9)) for error in errors)),
        "worst": max(errors),
        "inside": (sum(inside), len(inside)),
        "baselines": [(100 * fmean(each) if each else 0.0, len(each)) for each in given],
    }


def unseen(rows: Sequence[Row]) -> dict[str, float]:
    """Of the blind rows of full hosts, from one device's figure: mean errors in percent, the part that is inside."""
    sets = {f"blind: {row['set']}" for row in anchored.table("filled_hosts_blind")}
    mine = [row for row in rows if row.set in sets]
    return {
        "rows": len(mine),
        "mean": fmean(abs(row.error_percent) for row in mine),
        "bias": fmean(row.error_percent for row in mine),
        "plain_sum": 100 * fmean(abs((row.plain_sum or 0.0) / row.measured - 1) for row in mine),
        "inside": fmean((row.low or 0.0) <= row.measured <= (row.high or 0.0) for row in mine),
    }


def left_out(sets: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """By set: the factor of all intervals by which 90 % of the other sets' rows lie inside, and what it covers here.

    Each set has the same weight. Curves of latency are left out: their intervals are of a fit, not of a prediction.
    """
    errors = {
        name: np.sort([each for row in rows if (each := _widths(row)) is not None])
        for name, rows in sets.items()
        if name not in CURVES
    }
    errors = {name: each for name, each in errors.items() if len(each)}
    found = []
    for name, mine in errors.items():
        others = [each for other, each in errors.items() if other != name]
        values = np.concatenate(others)
        weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in others])
        order = np.argsort(values)
        reached = np.cumsum(weights[order]) / weights.sum()
        factor = float(values[order][np.searchsorted(reached, COVERED)])
        hits = int((mine <= 1).sum())
        found.append(
            {
                "set": name,
                "rows": len(mine),
                "inside": hits / len(mine),
                "could_be": wilson(hits, len(mine)),
                "factor": factor,
                "with": (mine <= factor).mean(),
            }
        )
    return found


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion, for independent trials (Wilson 1927)."""
    z = NormalDist().inv_cdf(0.975)
    middle, share = (hits + z * z / 2) / (count + z * z), hits / count
    half = z / (count + z * z) * math.sqrt(count * share * (1 - share) + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def _widths(row: Row) -> float | None:
    """How far the measured value is off, in half widths of the interval on its side (of logarithms); None without."""
    if row.low is None or row.high is None:
        return None
    edge = row.low if row.measured < row.predicted else row.high
    return abs(math.log(row.measured / row.predicted)) / max(1e-9, abs(math.log(edge / row.predicted)))


if __name__ == "__main__":
    harness.exit_with(main)
