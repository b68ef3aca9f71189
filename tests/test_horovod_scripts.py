"""Plain scripts in the steps of Horovod's documentation train under horovodrun, one for each framework.

horovodrun is started as `--launcher horovodrun` does, which saves an import; tests/test_train.py starts it as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hvdkit.launch.launchers import horovodrun
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import ROOT, rest_thorough

pytestmark = pytest.mark.long

RUNTIMES = {
    "pytorch": "pytorch",
    "tensorflow1": "tensorflow",
    "tensorflow2": "tensorflow",
    "keras3": "tensorflow",
    "mxnet": "mxnet",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", [*rest_thorough("pytorch", "tensorflow1", "tensorflow2", "keras3"), "mxnet"])
def test_a_script_trains_on_two_ranks(tmp_path: Path, script: str) -> None:
    python = find(RUNTIMES[script]).python
    path = ROOT / "tests" / "horovod_scripts" / f"train_{script}.py"
    command = [python, horovodrun.PROGRAM, "--gloo", "-np", "2", python, path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "HOROVOD_IDLE_CYCLE_TIME": "100"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=hygiene.patience(280)
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = dict(re.findall(r"trained (\d) (\S+ \S+)$", done.stdout, re.MULTILINE))
    assert set(found) == {"0", "1"}, done.stdout[-2000:]
    accuracy, _ = map(float, found["0"].split())
    assert accuracy > 0.9, found
    assert found["0"] == found["1"], "the ranks have different weights, but saw different data"
    assert list(tmp_path.glob("checkpoint*")), "rank 0 saves the model"
