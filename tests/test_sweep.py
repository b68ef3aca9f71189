"""`hvdkit predict --sweep`: a grid of what-ifs, each as `hvdkit predict` predicts it alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import hvdkit
from hvdkit.errors import RequestError
from hvdkit.profiling import published
from hvdkit.recipe import grid as grids
from hvdkit.results import profile as profiles
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import settings as settings_
from hvdkit.simulator import sweep as sweeping
from tests import simulating
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check

P100 = ("--cluster", "p100-roce25")
TOPK = "{method: topk, ratio: 0.01}"


@pytest.fixture()
def profile(tmp_path: Path) -> Path:
    profiles.save(simulating.profile(), tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.mark.parametrize("kind", ["measured on CPUs", "published"])
def test_each_what_if_is_predicted_as_alone(profile: Path, kind: str) -> None:
    """Over policies, compressions, links, numbers of ranks and batch sizes, with jitter and without."""
    links, found = clusters.load(Path("p100-roce25")), profiles.load(profile)
    if kind == "published":  # its overlap is not shown
        found = published.profile("resnet18", 500, 32, "P100")
    grid = grids.read(
        [
            "n=1,4,64", "policy=horovod,ddp,grouped,mg-wfbp", f"compression=none,{TOPK}", "batch_size=32,64",
            "link.roce.busy=0,0.5", "jitter=0,0.1",
        ],
        "--sweep",
    )  # fmt: skip
    level = links.levels[-1].name
    grid = {key.replace("roce", level): values for key, values in grid.items()}
    whatifs = sweeping.checked(grid, [], ["sync.every=1"], None, links)
    made = sweeping.sweep(found, links, whatifs)
    assert len(made.rows) == 3 * 4 * 2 * 2 * 2 * 2
    for row, each in list(zip(made.rows, whatifs, strict=True))[::5]:
        cluster = settings_.applied(links, each.settings)
        (alone,) = predicting.predict(found, cluster, [each.ranks], each.settings).points
        assert (row.ranks, row.batch_size) == (alone.ranks, alone.batch_size)
        near = 1e-2 if alone.policy == "horovod" else 2e-3  # gradients that just reach a cycle, or just miss it
        assert row.step_ms == pytest.approx(alone.step_ms, rel=near), row.what
        assert (row.low_ms, row.high_ms) == pytest.approx((alone.low_ms, alone.high_ms), rel=near), row.what
        assert row.efficiency == pytest.approx(alone.efficiency, rel=near)
        assert set(alone.warnings) <= {*made.notes, *(each for each in alone.warnings if "% of the step" in each)}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n=8,16,...,128", [8, 16, 32, 64, 128]),
        ("n=8,16,…,128", [8, 16, 32, 64, 128]),
        ("n=4,8, ... ,20", [4, 8, 12, 16, 20]),
        ("jitter=0,0.05,...,0.2", [0, 0.05, 0.1, 0.15, 0.2]),
        ("speed=1,0.1,...,0.001", [1, 0.1, 0.01, 0.001]),
        ("policy=ddp", ["ddp"]),
        (f"compression=none,fp16,{TOPK}", ["none", "fp16", {"method": "topk", "ratio": 0.01}]),
    ],
)
def test_values_and_series(text: str, values: list[object]) -> None:
    (found,) = grids.read([text], "--sweep").values()
    assert found == pytest.approx(values) if isinstance(values[0], float) or "jitter" in text else found == values


def test_the_command_and_the_function_write_the_same(inside: Hvdkit, profile: Path, tmp_path: Path) -> None:
    asked = ("--sweep", "n=8,16,...,1024", "--sweep", "batch_size=32,64", "--set", "speed=30")
    cluster = ("--cluster", "aws-p3-16xlarge")
    inside("predict", profile, *cluster, "-n", 8, "--out", "found")
    done = inside("predict", profile, *cluster, *asked, "--out", "found", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "found" / "predict.json").exists()
    assert "1024" in done.stdout and "images/s" in done.stdout
    assert (tmp_path / "found" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "found" / "sweep.json").read_text())
    assert [row["what"] for row in found["rows"]][:3] == [
        {"n": 8, "batch_size": 32}, {"n": 8, "batch_size": 64}, {"n": 16, "batch_size": 32},
    ]  # fmt: skip
    with (tmp_path / "found" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step_ms"]) for row in rows] == [row["step_ms"] for row in found["rows"]]
    one = found["rows"][0]
    assert one["cost_per_million_images"] == pytest.approx(1e6 / one["images_per_second"] * 8 * 3.06 / 3600)
    made = hvdkit.sweep(
        profile, {"n": [8, 16, 32, 64, 128, 256, 512, 1024], "batch_size": [32, 64]}, cluster="aws-p3-16xlarge",
        settings={"speed": 30}, out=tmp_path / "b",
    )  # fmt: skip
    assert made.model_dump(mode="json") == found
    assert made.to_pandas().shape[0] == 16


def test_a_grid_of_python_is_checked_too(profile: Path) -> None:
    with pytest.raises(RequestError, match="expected at least one value"):
        hvdkit.sweep(profile, {"n": []}, cluster="p100-roce25")
    with pytest.raises(RequestError, match="grid"):
        hvdkit.sweep(profile, "n=8", cluster="p100-roce25")
