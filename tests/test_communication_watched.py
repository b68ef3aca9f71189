"""A run's own communication is watched: Horovod counts, ranks agree, and who reads sees when a link becomes slow."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdkit.handlers import tensorboard
from hvdkit.handlers.communication import Changes, Sample
from hvdkit.launch.launchers import direct
from hvdkit.report import page
from hvdkit.results.train import MetricLine, read_metrics
from tests import hygiene
from tests.cluster import starving
from tests.conftest import Hvdkit, rest_thorough
from tests.launching import framework_job, wait_until

pytestmark = pytest.mark.long

OLD = "this Horovod is older than its patches; run make runtimes"
FEW = ["model.name=resnet8", "tune=rule", "checkpoint=null", "threads=1"]

COUNTED = f"""
import time
import torch
import horovod.torch as hvd

hvd.init()
basics = hvd.mpi_ops._basics
assert hasattr(basics, "communication_counters"), "{OLD}"
rank, many = hvd.rank(), torch.ones(2**18)  # 1 MiB
hvd.allreduce(torch.ones(2**14 - 1), name="few")  # 4 bytes too few
for turn in range(4):
    time.sleep(2.0 * (rank == turn))  # the other one waits, once
    hvd.allreduce(many, name="many")
hvd.grouped_allreduce([many[: 2**17], many[: 2**17]], name="both")
hvd.allgather(many, name="gathered")
hvd.broadcast(many, 1, name="sent")
hvd.alltoall(many, name="dealt")
hvd.reducescatter(many, name="scattered")
own = hvd.add_process_set([0])
if rank == 0:
    hvd.allreduce(many, name="alone", process_set=own)
hvd.allreduce(torch.ones(1), name="end")
for *row, seconds in basics.communication_counters():
    print("row", *row, seconds)
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("sharing", [2, 0])
def test_horovod_counts_what_large_collectives_carry(tmp_path: Path, sharing: int) -> None:
    (tmp_path / "rank.py").write_text(COUNTED)
    environment = {"HOROVOD_SHARED_MEMORY": str(int(bool(sharing))), "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    job = framework_job("pytorch", tmp_path, tmp_path / "rank.py", **environment)
    direct.run(job)
    mib = 2**20
    for rank in range(2):
        rows = [line.split()[1:] for line in job.log(rank).read_text().splitlines() if line.startswith("row ")]
        found = {(name, *map(int, counts)) for name, *counts, _ in rows}
        alone = {row for row in found if row[1] == 1}
        assert found - alone == {
            ("allreduce", 2, sharing, 5, 5 * mib),
            *((name, 2, sharing, 1, mib) for name in ("allgather", "broadcast", "alltoall", "reducescatter")),
        }
        assert [(row[0], *row[3:]) for row in alone] == [("allreduce", 1, mib)] * (rank == 0)
        seconds = {row[0]: float(row[-1]) for row in rows if row[1] == "2"}
        assert min(seconds.values()) > 0
        assert seconds["allreduce"] < 1.8, "each rank has waited for two seconds until the other was ready"


def rated(values: list[float], changes: Changes | None = None, first: int = 1) -> list[tuple[int, str]]:
    """What is said after which value, of lines of 10 steps each."""
    changes = changes or Changes()
    said = [(i, changes.after(Sample(10 * i + 1, 60.0 * i, value))) for i, value in enumerate(values, start=first)]
    return [(i, line) for i, line in said if line is not None]


def test_a_fall_and_the_return_are_each_one_line() -> None:
    (fallen, first), (back, second) = rated([90.0] * 30 + [20.0] * 200 + [88.0] * 50)
    assert 30 < fallen <= 35 and 230 < back <= 235
    assert re.search(r"fallen from 90 to 20 Mbit/s since step 311 \(\d\d:\d\d:\d\d\)", first), first
    assert re.search(r"back at 88 Mbit/s since step 2311 \(\d\d:\d\d:\d\d\), after 20 of 90", second), second


@pytest.mark.parametrize("seed", range(10))
def test_a_steady_link_says_nothing(seed: int) -> None:
    """Noise with a factor of 1.3 either way, and one line in twenty at a fifth of the rate."""
    drawn = random.Random(seed)
    values = [90 * drawn.lognormvariate(0, 0.26) * (0.2 if drawn.random() < 0.05 else 1) for _ in range(2000)]
    assert rated(values) == []


def test_what_is_not_a_fall() -> None:
    assert rated([90.0] * 50 + [50.0] * 50) == [], "more than a half"
    assert rated([20.0] * 3 + [90.0] * 50) == [], "a slow start"
    assert rated(([90.0] * 5 + [10.0] * 2) * 30) == [], "short ones"
    assert rated([90.0] * 4 + [10.0] * 5) == [], "nobody knows yet what it was"
    (_, line), *more = rated([90.0] * 20 + [20.0] * 30 + [60.0] * 50)
    assert "to 20" in line and more == [], "better, but not back"


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_link_that_becomes_slow_and_fast_again_is_told(recipe: Path, tmp_path: Path) -> None:
    """Two hosts, whose links carry 20, then 4, then 20 Mbit/s: a step is long beside what a busy machine adds to it."""
    out = tmp_path / "out"

    def told(what: str) -> bool:
        return any(what in warning for line in lines() for warning in line.warnings or [])

    def lines() -> list[MetricLine]:
        return list(read_metrics(out / "metrics.jsonl"))

    with starving.network(2, 20.0) as network:
        command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "-np", "2"]
        where = ["-H", network.hosts_option(), "--out", str(out), "batch_size=4"]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = network.start([*command, *where, *FEW, "log_every=1", "epochs=1000", "steps=100"], **options)
        changed: list[int] = []
        for rate, done in (
            (4.0, lambda: len(lines()) > 20),
            (20.0, lambda: told("fallen")),
            (None, lambda: process.poll() is not None),
        ):
            reached = wait_until(lambda done=done: done() or process.poll() is not None, 120)
            if not reached or (rate is not None and process.poll() is not None):
                process.terminate()
                pytest.fail(process.communicate(timeout=hygiene.patience(60))[0])
            if rate is not None:
                assert lines()[-1].communication_mbit_per_s, OLD
                changed.append(len(lines()))
                network.set_rate(rate)
        said = process.communicate(timeout=hygiene.patience(60))[0]
    assert process.returncode == 0, said
    result = json.loads((out / "result.json").read_text())
    fallen, back = result["communication_notes"]
    usual, low, step = map(float, re.findall(r"from (\S+) to (\S+) Mbit/s since step (\d+) ", fallen)[0])
    assert low < 4.4 and 2 * low < usual < 22 and step >= changed[0], (fallen, changed)
    (again,) = re.findall(r"back at (\S+) Mbit/s since step \d+ .*, after \S+ of \S+", back)
    assert low < 0.75 * usual < float(again) < 22
    assert said.count(f"warning: {fallen}") == said.count(f"warning: {back}") == 1, said
    assert 0 < result["communication_mbit_per_s_lowest"] < 4.4 and 0 < result["communication_mbit_per_s"] < 22
    text = page.write(out)[1].read_text()
    assert fallen in text.replace("\\", "") and back in text.replace("\\", "")


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", rest_thorough("mxnet", "tensorflow", "keras"))
def test_ranks_of_one_host_have_a_bandwidth_and_no_links(hvdkit: Hvdkit, framework: str, tmp_path: Path) -> None:
    shape = [*FEW, "tensorboard=true", "log_every=4", "steps=14"]
    done = hvdkit("train", "resnet20-digits", "--framework", framework, "-np", "2", "--out", tmp_path / "run", *shape)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "communication_notes" not in result or result["communication_notes"] is None
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    rates = [line.communication_mbit_per_s for line in lines if not line.ends_epoch]
    assert len(rates) == 3 and all(rate and rate > 0 for rate in rates), OLD
    assert result["communication_mbit_per_s"] >= result["communication_mbit_per_s_lowest"] > 0
    (name,) = [tag for tag in tensorboard.scalars(lines[0]) if "communication" in tag]
    assert name == "train/communication_mbit_per_s"
