"""Collectives of bfloat16, which Horovod as released does not have (hvdkit/runtimes/patches)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from hvdkit.runtimes.store import find
from tests.conftest import ROOT, run
from tests.launching import framework_job

RANK = ROOT / "tests" / "bfloat16_rank.py"


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("runtime", "module", "count"), [("pytorch", "torch", "20"), ("tensorflow", "tensorflow", "21")]
)
def test_every_collective_takes_bfloat16(tmp_path: Path, runtime: str, module: str, count: str) -> None:
    """Over Gloo, and over MPI where Horovod was built with it."""
    found = find(runtime)
    job = framework_job(runtime, tmp_path / "gloo", RANK, runtime, module, HOROVOD_SHARED_MEMORY="0")
    direct.run(job)
    said = job.log(0).read_text() + job.log(1).read_text()
    assert re.findall(r"^right (\d+)$", said, re.MULTILINE) == [count, count]
    for controller in {*found.controllers} - {"gloo"}:
        command = [found.python.parent / "horovodrun", f"--{controller}", "-np", "2", *job.command()]
        done = run([str(word) for word in command], 140, cwd=tmp_path, env=os.environ | job.environment)
        assert re.findall(r"right (\d+)$", done.stdout, re.MULTILINE) == [count, count], controller
