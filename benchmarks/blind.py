"""Predictions that were committed before the measured values were looked at: benchmarks/blind.csv.

`.venv/bin/python benchmarks/blind.py` wrote it, once: it is not written anew. The measured values came into
benchmarks/blind_measured.csv with a later commit, from the files that the sets name.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import anchored
import published_sets
from validation_row import Row

from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.predict import Point, point
from hvdkit.simulator.settings import Settings

HERE = Path(__file__).parent
PREDICTED, MEASURED = HERE / "blind.csv", HERE / "blind_measured.csv"
# simulator/traces/imagenet/placements.csv of github.com/petuum/adaptdl, the part behind placement 133: digits are the
# GPUs on each host.
PLACEMENTS = ("2", "3", "4", "22", "33", "44", "222", "333", "444", "2222", "3333", "4444")
# sched/traces/cifar10/scalability.csv there: ResNet-18, hosts and GPUs.
SPREAD = ((6, 6), (8, 8), (12, 12), (16, 16), (8, 16), (12, 24), (16, 32), (16, 40), (12, 48), (16, 64))
CIFAR = {64: 0.05983335971832275, 257: 0.18708271980285646, 725: 0.4961158037719727}  # one GPU, placements.csv
# results.md of github.com/mvsjober/ml-benchmarks, rows of 2024 and later: images/s over GPUs times those of one.
LATER = tuple((m, p, n) for m in ("puhti", "mahti", "lumi") for p in ("fp32", "fp16") for n in (2, 4, 8, 16, 32))


def predicted() -> Iterator[tuple[str, str, str, float, float, float]]:
    """(set, row, unit, predicted, low, high)."""
    t4 = clusters.load(Path("aws-g4dn-12xlarge"))
    one = {int(row["batch"]): float(row["step_s"]) for row in anchored.table("pollux_imagenet") if row["gpus"] == "1"}
    for placement in PLACEMENTS:
        hosts, ranks = len(placement), sum(map(int, placement))
        for batch, seconds in one.items():
            found = _point("ResNet-50", batch, seconds, t4, ranks, hosts)
            yield "Pollux, placements", f"{placement}, batch {batch}", "ms", found.step_ms, found.low_ms, found.high_ms
    for hosts, ranks in SPREAD:
        for batch, seconds in CIFAR.items():
            found = _point("ResNet-18", batch, seconds, t4, ranks, hosts)
            row = f"{ranks} GPUs on {hosts} hosts, batch {batch}"
            yield "Pollux, CIFAR-10", row, "ms", found.step_ms, found.low_ms, found.high_ms
    speeds = {
        (row["machine"], row["precision"]): float(row["images_per_s"])
        for row in anchored.table("csc_2023")
        if row["gpus"] == "1"
    }
    for machine, precision, ranks in LATER:
        cluster = clusters.load(published_sets.MACHINES / f"{machine}.yaml")
        seconds = 32 / speeds[machine, precision]
        found = _point("ResNet-50", 32, seconds, cluster, ranks, None)
        percents = (100e3 * seconds / each for each in (found.step_ms, found.high_ms, found.low_ms))
        yield "CSC, later", f"{machine}, {precision}, ddp, {ranks} GPUs", "% efficiency", *percents


def rows() -> Iterator[Row]:
    """The committed predictions for which a measured value was found."""
    with MEASURED.open(newline="") as file:
        lines = (line for line in file if not line.startswith("#"))
        measured = {(row["set"], row["row"]): float(row["measured"]) for row in csv.DictReader(lines)}
    with PREDICTED.open(newline="") as file:
        for row in csv.DictReader(file):
            value = measured.get((row["set"], row["row"]))
            if value is not None:
                middle, low, high = (float(row[key]) for key in ("predicted", "low", "high"))
                yield Row(f"blind: {row['set']}", row["row"], row["unit"], middle, value, "validation", low, high)


def _point(model: str, batch: int, seconds: float, cluster: clusters.Cluster, ranks: int, hosts: int | None) -> Point:
    work = anchored.workload(model, batch, seconds)
    calibration = Calibration(work, Settings(policy="ddp"), published_sets.ERROR)
    return point(calibration, cluster, ranks, Settings(hosts=hosts))


if __name__ == "__main__":
    if PREDICTED.exists():
        sys.exit(f"{PREDICTED} is there already: it holds what was predicted before the measured values were known")
    with PREDICTED.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("set", "row", "unit", "predicted", "low", "high"))
        writer.writerows((*each[:3], *(f"{value:.4g}" for value in each[3:])) for each in predicted())
