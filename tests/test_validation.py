"""What `make validate` finds: the marks, and that the committed files are what it finds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import own_hosts_rows, validate, validation_sets
from benchmarks.anchored import Row
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.piecewise_linear import of_pieces
from tests.conftest import ROOT

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(validation_sets.all_rows())


def errors(rows: list[Row], *names: str) -> list[float]:
    found = [abs(row.error_percent) for row in rows if row.set in names and row.used_for == "validation"]
    assert found
    return found


def test_closed_forms_are_met_exactly(rows: list[Row]) -> None:
    assert max(errors(rows, "closed forms")) < 1e-9
    assert len(errors(rows, "closed forms")) >= 20


@pytest.mark.parametrize("name", ["OSU, 10GbE", "Gloo, 40GbE"])
def test_points_left_out_of_a_curves_fit_are_predicted(rows: list[Row], name: str) -> None:
    found = errors(rows, name)
    assert math.exp(sum(math.log(max(error, 1e-6)) for error in found) / len(found)) <= 8


@pytest.mark.parametrize(
    ("name", "count", "mean"),
    [
        ("GoogLeNet, K80", 3, 6),
        ("NVIDIA, ResNet-50", 20, 6.5),
        ("TensorFlow 2017", 77, 7.7),
        ("Horovod 2018", 3, 9),
        ("Horovod 2017", 9, 15),
        ("DLPerf, V100", 18, 12),
        ("CSC 2023", 20, 12),
        ("AWS P3 2018", 5, 12),
        ("TensorFlow 2017, clusters", 14, 15),
        ("Pollux, T4", 108, 15),
        ("blind: Pollux, placements", 96, 15),
        ("blind: Pollux, CIFAR-10", 24, 15),
        ("blind: CSC, later", 12, 12),
        ("blind: NVIDIA, ResNeXt", 8, 12),
        ("blind: NVIDIA, Transformer-XL", 34, 12),
        ("blind: NVIDIA, speech", 8, 12),
        ("blind: DDP, synthetic images", 4, 12),
    ],
)
def test_each_published_set_keeps_its_mark(rows: list[Row], name: str, count: int, mean: float) -> None:
    found = errors(rows, name)
    assert len(found) == count
    assert sum(found) / count <= mean


def test_nine_of_ten_measured_values_lie_inside_the_intervals(rows: list[Row]) -> None:
    curves = {"OSU, 10GbE", "Gloo, 40GbE"}
    asked = [row for row in rows if row.used_for == "validation" and row.low is not None and row.set not in curves]
    inside = [row.low <= row.measured <= row.high for row in asked if row.low is not None and row.high is not None]
    assert len(inside) > 450
    assert 0.85 <= sum(inside) / len(inside) <= 0.98


def test_blind_rows_are_those_that_were_committed(rows: list[Row]) -> None:
    """The values were looked up later: no prediction is made anew, and each value belongs to one."""
    measured = [line for line in validation_sets.MEASURED.read_text().splitlines() if not line.startswith("#")]
    found = [row for row in rows if row.set.startswith("blind")]
    assert len(found) == len(measured) - 1 == 186


def test_full_hosts_that_nobody_had_seen_are_predicted_from_one_device(rows: list[Row]) -> None:
    found = validate.unseen(rows)
    assert found["rows"] == 54 and found["mean"] <= 12 and abs(found["bias"]) <= 5
    assert 0.85 <= found["inside"] <= 0.98 and found["mean"] < found["plain_sum"]


def test_steps_on_own_hosts_are_predicted_in_their_order(rows: list[Row]) -> None:
    found = errors(rows, "own hosts")
    assert len(found) == 30
    assert sum(found) / len(found) <= 4
    assert max(found) <= 10
    wrong, pairs = own_hosts_rows.disordered(rows)
    assert (wrong, pairs >= 30) == ([], True)


def test_no_row_is_both_calibrated_on_and_validated(rows: list[Row]) -> None:
    seen = {use: {(row.set, row.row) for row in rows if row.used_for == use} for use in ("calibration", "validation")}
    assert len(seen["calibration"]) + len(seen["validation"]) == len(rows), "each row once"
    assert seen["calibration"].isdisjoint(seen["validation"])


def test_the_committed_errors_are_what_is_found(rows: list[Row]) -> None:
    for one in json.loads((ROOT / "docs" / "validation.json").read_text()):
        found = validate.summary(
            one["set"], [row for row in rows if row.set == one["set"] and row.used_for == "validation"]
        )
        assert (one["rows"], one["inside"]) == (len(found["rows"]), list(found["inside"]))
        assert [one[key] for key in ("mean", "worst")] == pytest.approx(
            [found["mean"], found["worst"]], rel=1e-6, abs=1e-9
        )


def test_the_k80s_cluster_file_is_the_fit() -> None:
    shipped, fitted = clusters.load(Path("k80-10gbe")), validation_sets.k80_cluster()
    for one, other in zip(shipped.measured, fitted.measured, strict=True):
        sizes = np.array([4, 1000, 100_000, 10_000_000])
        assert of_pieces(one.pieces)(sizes) == pytest.approx(of_pieces(other.pieces)(sizes), rel=1e-3)


def test_how_much_a_few_rows_show() -> None:
    """Wilson's interval, as in his paper's and others' tables: 4 of 5, 5 of 5, 81 of 90."""
    for hits, count, low, high in ((4, 5, 0.376, 0.964), (5, 5, 0.566, 1.0), (81, 90, 0.821, 0.947)):
        assert validate.wilson(hits, count) == pytest.approx((low, high), abs=1e-3)
