"""Scripts for DistributedDataParallel become scripts for Horovod, with the same weights, by the lines that differ."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import Hvdkit

SCRIPTS = Path(__file__).parent / "launched" / "ddp"
COMPARE = """
import sys, torch
first, second = (torch.load(path) for path in sys.argv[1:])
worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(first, second, strict=True))
assert worst < 1e-5, worst
"""


@pytest.mark.parametrize("name", ["loop", "accumulate", "trainer"])
def test_a_script_for_ddp_trains_the_same_weights_under_horovod(name: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    python = find("pytorch").python
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    before = [*torchrun, str(SCRIPTS / f"{name}.py"), str(tmp_path / "before")]
    ddp = subprocess.run(before, cwd=tmp_path, capture_output=True, text=True, timeout=hygiene.patience(120))
    assert ddp.returncode == 0, ddp.stdout + ddp.stderr
    after = [str(SCRIPTS / f"{name}_horovod.py"), str(tmp_path / "after")]
    done = hvdkit("launch", "-np", "2", "--out", str(tmp_path / "run"), *after)
    assert done.returncode == 0, done.stdout + done.stderr
    compare = [str(python), "-c", COMPARE, str(tmp_path / "before"), str(tmp_path / "after")]
    subprocess.run(compare, check=True, timeout=hygiene.patience(60))
