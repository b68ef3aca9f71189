"""`hvdkit bench links`: real hosts in namespaces whose rate changes, and what is made of a series."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hvdkit.commands import bench_links
from hvdkit.results.links import LinkRow, Links
from hvdkit.simulator import cluster
from tests import hygiene
from tests.cluster import starving
from tests.conftest import ROOT
from tests.launching import wait_until

pytestmark = pytest.mark.check
HOUR_S = 3600.0


@pytest.mark.ranks
def test_a_series_sees_the_rate_change_and_goes_on(tmp_path: Path) -> None:
    """Nothing makes a link faster than its limit, so the limit is what the figures must stay below.

    The hosts' other network, by which ranks are started, has no limit: those of HOROVOD_GLOO_IFACE are measured.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HVDKIT_RUNTIMES": str(tmp_path / "none")}
    file = tmp_path / "found" / "links.json"
    with starving.network(3, 40.0) as network:
        command = [sys.executable, "-m", "hvdkit", "bench", "links", "-H", network.hosts_option(1), "--rated", "40"]
        command += ["--seconds", "0.4", "--every", "1s", "--out", str(tmp_path / "found")]
        for rate, more in ((40.0, ["--for", "1s"]), (10.0, ["--for", "1d", "--resume"])):
            network.set_rate(rate)
            if more[-1] == "--resume":  # until two more rounds are there, then it is ended
                going = network.start([*command, *more], env=environment)
                assert wait_until(lambda: json.loads(file.read_text())["rounds"] >= 2, 90)
                going.terminate()
                going.wait(hygiene.patience(30))
            else:
                network.run([*command, *more], env=environment, timeout=hygiene.patience(90), check=True)
    found = Links.model_validate_json((tmp_path / "found" / "links.json").read_bytes())
    first, later = found.rows[:6], found.rows[6:12]
    assert {(row.source, row.target) for row in first} == {(row.source, row.target) for row in later}
    assert not any(row.fault for row in (*first, *later))
    assert all(0 < (row.mbit_per_s or 0) < 44 and row.latency_us and row.rated_mbit_per_s == 40 for row in first)
    assert all(0 < (row.mbit_per_s or 0) < 11 for row in later)
    assert cluster.load(tmp_path / "found" / "cluster.yaml").levels[0].varies_percent > 10
    assert (tmp_path / "found" / "links.png").stat().st_size > 5000


def test_peak_and_quiet_hours_the_spread_and_a_doubtful_rate(tmp_path: Path) -> None:
    """A link at 100 Mbit/s that falls to a half every sixth hour."""
    rows = [
        LinkRow(
            at_s=hour * HOUR_S, source="a", target="b", latency_us=200.0, mbit_per_s=50.0 if hour % 6 == 0 else 100.0
        )
        for hour in range(24)
    ]
    series = Links(hvdkit_version="0", hosts=["a", "b"], seconds=1, rounds=24, rows=rows)
    hours = series.by_hour()
    assert len(hours) == 24 and sorted(hours.values())[:5] == [0.5] * 4 + [1.0]
    (level,) = bench_links.network(series).levels
    assert (level.pieces[0].latency_us, level.pieces[0].mbit_per_s) == (100.0, 100.0)
    assert 50 < level.varies_percent < 100
    steady = series.model_copy(update={"rows": [row for row in rows if row.mbit_per_s == 100.0]})
    assert bench_links.network(steady).levels[0].varies_percent == 0
    for rated, doubted in ((100.0, False), (60.0, True)):
        beside = [row.model_copy(update={"rated_mbit_per_s": rated}) for row in rows]
        shown = bench_links.lines(
            bench_links.BenchLinksRequest(), series.model_copy(update={"rows": beside}).at(tmp_path)
        )
        assert any("far more than what it is rated" in str(line) for line in shown) == doubted
