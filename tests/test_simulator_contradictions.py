"""Answers that contradicted each other, as a stranger found them with cluster files from published descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdkit.errors import RequestError
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import piecewise_linear
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.predict import Point, point
from hvdkit.simulator.settings import Settings, applied, read
from hvdkit.simulator.workload import Gradient, Workload
from tests import simulating

pytestmark = pytest.mark.check

CURVE = {
    "operation": "allreduce",
    "ranks": 4,
    "pieces": [
        {"from_bytes": 0, "latency_us": 600.0, "mbit_per_s": 500.0},
        {"from_bytes": 100_000, "latency_us": 1900.0, "mbit_per_s": 700.0},
    ],
    "residual_percent": 3.0,
    "smallest_bytes": 4,
    "largest_bytes": 10**6,
}
ETHERNET = simulating.cluster(measured=[CURVE])


def predicted(cluster: Cluster, ranks: int, *asked: str, work: Workload | None = None, **known: Any) -> Point:
    """ResNet-50 of 0.3 s a step, profiled on one GPU."""
    found = Calibration(work or simulating.workload(), Settings(policy="horovod", **known), 3.0)
    settings = read(asked)
    return point(found, applied(cluster, settings), ranks, settings)


def width(found: Point) -> float:
    return found.high_ms / found.low_ms


CENTRAL = ["policy=central", "servers=8"]


def test_servers_on_all_ranks_with_an_eighth_of_the_bytes_each_are_as_fast_as_a_ring() -> None:
    tensors = tuple(Gradient(f"t{i}", "t", (10**6,), 4 * 10**6, 1e-4) for i in range(64))
    work, made = Workload("any", 32, (("f", 0.01),), tensors), simulating.cluster(latency_us=0.0)
    central, ring = (predicted(made, 8, *each, work=work).step_ms for each in (CENTRAL, ["policy=caffe-mpi"]))
    assert central == pytest.approx(ring)


def test_a_setting_that_is_as_in_the_file_changes_nothing() -> None:
    plain = predicted(ETHERNET, 4)
    for same in ("link.net.busy=0", "link.net.ports=1", "link.net.mbit_per_s=8000", "link.net.latency_us=10"):
        assert predicted(ETHERNET, 4, same) == plain, same
    # and a small change changes a little, though what was measured was measured without it
    nearly = predicted(ETHERNET, 4, "link.net.busy=0.001")
    assert plain.step_ms < nearly.step_ms < 1.01 * plain.step_ms


def test_small_batches_have_a_floor_and_wide_intervals() -> None:
    v100 = clusters.load(Path("v100-nvlink-ib"))
    one = predicted(v100, 1, "batch_size=1")
    # 64 images take 300 ms, a sixty-fourth of which is 4.7 ms; published single images take 15 to 30 ms
    assert one.step_ms > 15
    assert width(one) > 3
    assert any("batch size 1 was not measured" in told for told in one.warnings)
    widths = [width(predicted(v100, 1, f"batch_size={size}")) for size in (64, 32, 16, 4, 1)]
    assert widths == sorted(widths)


def test_a_measured_curve_goes_on_at_its_asymptotic_rate() -> None:
    """The last points of a curve of latency and rate, with the noise that makes their best line go through zero."""
    sizes = [float(4 * 2**k) for k in range(20)]
    true = [500e-6 + size / 1e9 for size in sizes]
    seconds = [each * (0.97 if i >= 17 else 1.0) * (1.02 if i == 19 else 1.0) for i, each in enumerate(true)]
    pieces = piecewise_linear.fit(sizes, seconds)
    line = piecewise_linear.of_measured(pieces, max(sizes))
    for times in (2, 10, 100):
        size = times * max(sizes)
        assert float(line(size)) == pytest.approx(500e-6 + size / 1e9, rel=0.1)
    at = max(sizes)
    assert float(line(at * 1.0001)) == pytest.approx(float(line(at * 0.9999)), rel=0.01)


def test_ranks_may_be_placed_unevenly_and_networks_crowded() -> None:
    made = simulating.cluster(
        ranks_per_host=4,
        levels=[
            {"name": "near", "ranks": 4, "pieces": [{"from_bytes": 0, "latency_us": 2.0, "mbit_per_s": 80_000.0}]},
            {
                "name": "far",
                "pieces": [{"from_bytes": 0, "latency_us": 20.0, "mbit_per_s": 8_000.0}],
                "contention": 0.2,
            },
        ],
    )
    spread = ClusterLinks(made, 40, 16)
    assert (spread.hosts_used, spread.local) == (16, 3)
    assert (ClusterLinks(made, 40).hosts_used, ClusterLinks(made, 40).local) == (10, 4)
    size = 4e8
    four, sixteen = (float(ClusterLinks(made, n, n).cost("allreduce", "ring").line(size)) for n in (4, 16))
    # per byte sent, 16 hosts are slower by 1.6 / 1.2
    assert (sixteen / (15 / 16)) / (four / (3 / 4)) == pytest.approx(1.6 / 1.2, rel=0.01)
    assert predicted(made, 40, "hosts=16").ranks == 40


def test_a_curve_whose_times_fall_is_refused_by_key() -> None:
    document = ETHERNET.model_dump(mode="json")
    document["measured"][0]["pieces"][1]["latency_us"] = 0.0
    document["measured"][0]["pieces"][1]["mbit_per_s"] = 1e9
    with pytest.raises(RequestError, match=r"measured.0.pieces: expected times that rise .* raise latency_us"):
        clusters.read(document, "c.yaml")
