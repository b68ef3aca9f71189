"""Collectives of bfloat16, which Horovod as released does not have (hvdkit/runtimes/patches)."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import direct
from hvdkit.runtimes.store import find

RANK = ROOT / "tests" / "bfloat16_rank.py"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("runtime", "module"), [("pytorch", "torch"), ("tensorflow", "tensorflow")])
def test_every_collective_takes_bfloat16(tmp_path: Path, runtime: str, module: str) -> None:
    job = Job(find(runtime).python, [str(RANK), module], 2, parse_hosts(None, 2), {}, tmp_path)
    direct.run(job)
    for rank in range(2):
        told = [line for line in job.log(rank).read_text().splitlines() if line.startswith("right")]
        assert told == [{"torch": "right 20", "tensorflow": "right 21"}[module]]
