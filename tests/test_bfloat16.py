"""Collectives of bfloat16, which Horovod as released does not have (hvdkit/runtimes/patches)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from hvdkit.runtimes.store import find

RANK = ROOT / "tests" / "bfloat16_rank.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("runtime", "module", "count"), [("pytorch", "torch", "20"), ("tensorflow", "tensorflow", "21")]
)
def test_every_collective_takes_bfloat16(tmp_path: Path, runtime: str, module: str, count: str) -> None:
    """Over Gloo, and over MPI where Horovod was built with it."""
    found = find(runtime)
    assert "gloo" in found.controllers
    for controller in found.controllers:
        command = [found.python.parent / "horovodrun", f"--{controller}", "-np", "2", found.python, RANK, module]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert re.findall(r"right (\d+)$", done.stdout, re.MULTILINE) == [count, count], controller
