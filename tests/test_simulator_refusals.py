"""What no machine could run is refused in a line, with the key and the remedy; in grids and advice it is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdkit.errors import RequestError
from hvdkit.report.predict import advice_lines
from hvdkit.results import profile as profiles
from hvdkit.results.profile import Profile
from hvdkit.simulator import advise as advising
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import sweep as sweeping
from hvdkit.simulator.money import Money
from hvdkit.simulator.settings import Settings, read
from tests import simulating
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check

TWO_LEVELS = [
    {"name": "near", "ranks": 4, "pieces": [{"from_bytes": 0, "latency_us": 2, "mbit_per_s": 80000}]},
    {"name": "far", "pieces": [{"from_bytes": 0, "latency_us": 20, "mbit_per_s": 8000}]},
]


def on_a_device(peak_mib: float = 1000.0) -> Profile:
    """A profile at batch size 32 on a device whose memory was measured."""
    document = simulating.profile().model_dump(mode="json")
    document["memory"] |= {"device_peak_mib": peak_mib}
    return Profile.model_validate(document)


def machines(memory_mib: float | None = 4000.0, **more: Any) -> clusters.Cluster:
    return simulating.cluster(device={"name": "small", "memory_mib": memory_mib}, **more)


def test_buckets_that_were_chosen_for_one_stream_go_over_one() -> None:
    """By hypothesis: with two streams, mg-wfbp was slower over links of less latency, as it merged less."""
    cluster = simulating.cluster(software={"streams": 2})
    alike = [
        predicting.predict(simulating.profile(), each, [8], read(["policy=mg-wfbp"])).points[0].step_ms
        for each in (cluster, simulating.cluster(software={"streams": 1}))
    ]
    assert alike[0] == alike[1]
    with pytest.raises(RequestError, match="streams: expected 1, got 2: policy mg-wfbp sends its buckets one after"):
        predicting.predict(simulating.profile(), cluster, [8], read(["policy=mg-wfbp", "streams=2"]))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("servers=4", "servers: expected 1, got 4: only a central allreduce has servers; add --set allreduce=central"),
        ("allreduce=hierarchical", "allreduce: hierarchical needs two levels of links, made-up has one (net)"),
        ("batch_size=256", "batch_size: 256 needs about 8"),
        ("hosts=9", "hosts: expected 8, over which 8 ranks fit"),
        ("hosts=2", "hosts: expected 8, over"),
    ],
)
def test_the_impossible_is_refused_before_anything_is_written(
    inside: Hvdkit, tmp_path: Path, settings: str, expected: str
) -> None:
    profiles.save(on_a_device(), tmp_path / "p.json")
    clusters.save(machines(), tmp_path / "c.yaml")
    for command in ("predict", "advise"):
        done = inside(command, "p.json", "--cluster", "c.yaml", "-n", "8", "--set", settings, "--out", "o")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert expected in done.stderr
        assert not (tmp_path / "o").exists()


def test_the_memory_of_a_host_is_for_its_ranks_alone(inside: Hvdkit, tmp_path: Path) -> None:
    profiles.save(on_a_device(), tmp_path / "p.json")
    slow = [{"from_bytes": 0, "latency_us": 2, "mbit_per_s": 80}]
    memory = {"name": "near", "kind": "memory", "pieces": slow}
    for name, levels in (("c.yaml", [memory]), ("linked.yaml", [{**memory, "ranks": 4}, TWO_LEVELS[1]])):
        clusters.save(machines(ranks_per_host=4, levels=levels), tmp_path / name)
    for command in ("predict", "advise"):
        for asked, said in (
            (["-n", "64"], "-n 64: expected at least 1 and at most 4 ranks on cluster made-up, which has the memory"),
            (["-n", "4", "--set", "hosts=2"], "hosts: expected 1, over which 4 ranks fit with 4 a host"),
        ):
            done = inside(command, "p.json", "--cluster", "c.yaml", *asked, "--out", "o")
            assert (done.returncode, done.stderr.count("\n")) == (2, 1) and said in done.stderr
    for asked in (["-n", "4", "--cluster", "c.yaml"], ["-n", "64", "--cluster", "linked.yaml"]):
        done = inside("predict", "p.json", *asked, "--out", asked[1])
        assert done.returncode == 0, done.stderr
    advice = advising.advise(on_a_device(), clusters.load(tmp_path / "c.yaml"), 4, Settings(), Money())
    assert not any("near at" in each.what for each in advice.suggestions), "a link that could be faster"


def test_the_remedies_are_accepted() -> None:
    found = on_a_device()
    with pytest.raises(RequestError) as fault:
        predicting.predict(found, machines(), [8], read(["batch_size=256"]))
    most = int(str(fault.value).rpartition("batch_size=")[2].split()[0])
    (point,) = predicting.predict(found, machines(), [8], read([f"batch_size={most}"])).points
    assert point.memory_mib is not None and 3500 < point.memory_mib <= 3600, "a tenth stays free"
    with pytest.raises(RequestError):
        predicting.predict(found, machines(), [8], read([f"batch_size={most + 1}"]))
    predicting.predict(found, machines(), [8], read(["servers=4", "allreduce=central"]))
    predicting.predict(found, machines(), [8], read(["servers=4", "policy=central"]))
    two = machines(levels=TWO_LEVELS, ranks_per_host=4)
    predicting.predict(found, two, [8], read(["allreduce=hierarchical", "hosts=4"]))
    predicting.predict(found, machines(None), [8], read(["batch_size=4096"]))


def test_a_model_that_fits_no_batch_names_another_remedy() -> None:
    found = on_a_device().model_copy(deep=True)
    found.memory.optimizer_bytes = 8 * 2**30
    found.memory.device_peak_mib = 9000.0
    with pytest.raises(RequestError, match="give a device with more memory, or a smaller model"):
        predicting.predict(found, machines(), [1], Settings())
    with pytest.raises(RequestError, match="give --set sharding=optimizer"):
        predicting.predict(found, machines(), [8], Settings())


def test_a_grid_leaves_out_what_cannot_be_and_counts_it(inside: Hvdkit, tmp_path: Path) -> None:
    profiles.save(on_a_device(), tmp_path / "p.json")
    clusters.save(machines(), tmp_path / "c.yaml")
    grid = ["--sweep", "batch_size=32,64,256", "--sweep", "n=2,4"]
    done = inside("predict", "p.json", "--cluster", "c.yaml", *grid, "--out", "o")
    assert done.returncode == 0, done.stderr
    assert "2 what-ifs left out: batch_size: 256 needs about" in done.stdout
    made = sweeping.Sweep.model_validate_json((tmp_path / "o" / "sweep.json").read_text())
    assert [row.batch_size for row in made.rows] == [32, 32, 64, 64] and list(made.left_out.values()) == [2]
    done = inside("predict", "p.json", "--cluster", "c.yaml", "--sweep", "batch_size=256,512", "-n", "2", "--out", "p")
    assert done.returncode == 2 and "batch_size: 256 needs about" in done.stderr and not (tmp_path / "p").exists()


def test_advice_leaves_out_a_batch_that_does_not_fit_and_shows_the_best() -> None:
    """On a slow network larger batches gain most: 64 images fit, 128 do not."""
    found = on_a_device(2000.0)
    money = Money(price=1.0)
    far = TWO_LEVELS[1] | {"pieces": [{"from_bytes": 0, "latency_us": 50, "mbit_per_s": 100}]}
    slow = machines(5000.0, levels=[TWO_LEVELS[0], far], ranks_per_host=4)
    advice = advising.advise(found, slow, 64, Settings(), money)
    assert [what for what in advice.left_out if what.startswith("128 images")]
    tried = [each.what for each in advice.suggestions]
    assert [what for what in tried if what.startswith("64 images")]
    assert not [what for what in tried if what.startswith("128 images")]
    lines = advice_lines(advice)
    software = [each for each in advice.suggestions if each.kind == "software"]
    assert len(software) > 5 and f"  {len(software) - 5} more in advise.md" in lines
    assert sum("× images/s (" in line for line in lines) <= 10
    assert [line for line in lines if line.startswith("note: left out: 128 images")]
