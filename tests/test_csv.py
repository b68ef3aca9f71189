"""The CSV files say what the JSON files say."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hvdkit.errors import RunError
from hvdkit.report import csv_files
from hvdkit.report.rounds import ratios
from hvdkit.results import profile as profiles
from hvdkit.results.compare import read_comparison
from hvdkit.results.train import read_metrics
from tests import simulating
from tests.comparisons import change, several_rounds
from tests.conftest import Hvdkit
from tests.test_bench import measured

pytestmark = pytest.mark.check


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def value_at(document: Any, column: str) -> Any:
    """The value of a column in a JSON document, by its dotted name."""
    for key in column.split("."):
        document = None if document is None else document.get(key)
    return document


def same(cell: str, value: Any) -> bool:
    if value is None or isinstance(value, str):
        return cell == (value or "")
    return json.loads(cell) == value


def test_metrics_have_a_row_for_each_line(real: Path, tmp_path: Path) -> None:
    source = real / "runs" / "pytorch-np2" / "metrics.jsonl"
    lines = [json.loads(text) for text in source.read_text().splitlines()]
    last = {**lines[-1], "validation": {"accuracy": 0.5, "top, 5": 0.75}}  # a name that must be quoted
    source.write_text("".join(json.dumps(each) + "\n" for each in [*lines, last]) + '{"step": 9')
    csv_files.save_metrics(tmp_path / "metrics.csv", lambda: read_metrics(source))
    rows = read(tmp_path / "metrics.csv")
    assert list(rows[0])[:4] == ["step", "total_steps", "epoch", "ends_epoch"]
    assert list(rows[0])[-2:] == ["validation.accuracy", "validation.top, 5"]
    assert len(rows) == len(lines) + 1
    for row, document in zip(rows, [*lines, last], strict=True):
        document = {"unit": "images"} | document  # files of earlier versions have none
        assert all(same(cell, value_at(document, column)) for column, cell in row.items()), row


def test_metrics_of_a_run_without_a_line_have_their_columns(real: Path, tmp_path: Path) -> None:
    csv_files.save_metrics(tmp_path / "none.csv", list)
    assert read(tmp_path / "none.csv") == []
    lines = list(read_metrics(real / "runs" / "pytorch-np2" / "metrics.jsonl"))
    csv_files.save_metrics(tmp_path / "some.csv", lambda: lines)
    first, second = ((tmp_path / name).read_text().splitlines()[0].split(",") for name in ("none.csv", "some.csv"))
    assert first == [name for name in second if not name.startswith("validation.")]


def test_a_comparison_has_a_row_for_each_kind_of_run(real: Path, tmp_path: Path) -> None:
    change(real, several_rounds)
    document = json.loads((real / "compare.json").read_text())
    csv_files.save(tmp_path / "compare.csv", csv_files.comparison(read_comparison(real / "compare.json")))
    rows = read(tmp_path / "compare.csv")
    kinds = list(dict.fromkeys((run["framework"], str(run["np"]), run["rival"] or "") for run in document["runs"]))
    assert [(row["framework"], row["np"], row["rival"]) for row in rows] == kinds
    for row, (framework, np, rival) in zip(rows, kinds, strict=True):
        runs = [
            run
            for run in document["runs"]
            if (run["framework"], str(run["np"]), run["rival"] or "") == (framework, np, rival)
        ]
        assert (row["rounds"], row["noisy_rounds"]) == ("5", "1")
        for key in ("images_per_second", "step_ms_p50", "peak_rss_mib", "val_accuracy"):
            values = [run[key] for run in runs]
            assert float(row[f"{key}.median"]) == median(values)
            assert min(values) <= float(row[f"{key}.low"]) <= float(row[f"{key}.high"]) <= max(values)
        ratio = [row[f"ratio.{key}"] for key in ("median", "low", "high", "verdict")]
        assert ratio == (["1.25", "1.2", "1.3", "faster"] if rival else [""] * 4)


def test_one_round_has_no_intervals_and_its_efficiency(real: Path, tmp_path: Path) -> None:
    found = read_comparison(real / "compare.json")
    found = found.model_copy(update={"ratios": ratios(found.runs)})
    assert len(found.ratios) == 4
    csv_files.save(tmp_path / "compare.csv", csv_files.comparison(found))
    for row in read(tmp_path / "compare.csv"):
        assert row["images_per_second.median"] and not row["images_per_second.low"]
        known = [
            each.median for each in found.ratios if (each.framework, str(each.np)) == (row["framework"], row["np"])
        ]
        assert [float(row["efficiency.median"])] == known if known else not row["efficiency.median"]


def test_a_proof_has_a_row_for_each_framework(real: Path, tmp_path: Path) -> None:
    found = read_comparison(real / "compare.json").parity
    assert found is not None
    csv_files.save(tmp_path / "parity.csv", found.records())
    rows = read(tmp_path / "parity.csv")
    assert [row["framework"] for row in rows] == list(found.frameworks)
    for row, each in zip(rows, found.frameworks.values(), strict=True):
        document = {
            "framework": row["framework"],
            **json.loads(each.model_dump_json()),
            "missed": "; ".join(each.missed),
        }
        assert all(same(cell, document[column]) for column, cell in row.items())
        assert {"passed", "missed", "step_f64", "gradients_f32"} <= row.keys()


def test_a_profile_has_a_row_for_each_part_and_rank(tmp_path: Path) -> None:
    found = simulating.profile()
    csv_files.save(tmp_path / "profile.csv", csv_files.profile(found))
    rows = read(tmp_path / "profile.csv")
    assert {row["rank"] for row in rows} == {"", "0", "1"}
    for row in rows:
        split = found.ranks[int(row["rank"])].split if row["rank"] else found.step
        spread = getattr(split, f"{row['part']}_ms")
        assert [float(row[f"{name}_ms"]) for name in ("mean", "median", "low", "high")] == list(dict(spread).values())


def test_a_bench_has_a_row_for_each_size(tmp_path: Path) -> None:
    found = measured("allgather", 4, 10.0, 0.001)
    csv_files.save(tmp_path / "bench.csv", found.records())
    rows = read(tmp_path / "bench.csv")
    assert [int(row["size_bytes"]) for row in rows] == [each.size_bytes for each in found.rows]
    for row, each in zip(rows, found.rows, strict=True):
        document = {"collective": "allgather", "framework": found.framework, "np": 4, **each.model_dump()}
        assert list(row) == list(document)
        assert all(same(cell, document[column]) for column, cell in row.items())


def test_predictions_and_advice_are_written_by_their_commands(inside: Hvdkit, tmp_path: Path) -> None:
    profiles.save(simulating.profile(), tmp_path / "profile.json")
    asked = ("profile.json", "--cluster", "starved-100mbit")
    for _ in range(2):  # --overwrite replaces them
        done = inside("predict", *asked, "-n", 2, "-n", 4, "--out", "predict", "--overwrite")
        assert done.returncode == 0, done.stderr
    points = json.loads((tmp_path / "predict" / "predict.json").read_text())["points"]
    for row, point in zip(read(tmp_path / "predict" / "predict.csv"), points, strict=True):
        assert (row["model"], row["cluster"]) == ("resnet20", "starved-100mbit")
        assert all(same(row[key], point[key]) for key in ("ranks", "step_ms", "images_per_second", "efficiency"))
        assert "; ".join(point["warnings"]) == row["warnings"]
    done = inside("advise", *asked, "-n", 4, "--out", "advise")
    assert done.returncode == 0, done.stderr
    suggestions = json.loads((tmp_path / "advise" / "advise.json").read_text())["suggestions"]
    rows = read(tmp_path / "advise" / "advise.csv")
    assert rows and [row["what"] for row in rows] == [each["what"] for each in suggestions]
    assert [float(row["gain"]) for row in rows] == [each["gain"] for each in suggestions]
    words = rows[0]["settings"].split("; ")
    assert inside("predict", *asked, "-n", 4, *(word for each in words for word in ("--set", each))).returncode == 0


def test_no_rows_are_no_file_and_a_bad_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("old")
    csv_files.save(tmp_path / "a.csv", [])
    assert not (tmp_path / "a.csv").exists()
    with pytest.raises(RunError, match=r"^.*b\.csv: cannot be written"):
        csv_files.save(tmp_path / "nowhere" / "b.csv", [{"a": 1}])
