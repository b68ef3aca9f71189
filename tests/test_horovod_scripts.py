"""Plain scripts in the steps of Horovod's documentation, and in the form of its examples, train by `hvdkit launch`.

tests/test_train.py starts one by horovodrun itself.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, Hvdkit, rest_thorough

pytestmark = pytest.mark.long

SCRIPTS = ("pytorch", "mxnet", "tensorflow1", "tensorflow2", "keras3", "mnist_pytorch", "mnist_keras")
OPTIONS = ("--epochs", "8", "--fp16-allreduce", "--gradient-predivide-factor", "2")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", [*rest_thorough(*SCRIPTS), "mnist_mxnet"])
def test_a_script_trains_on_two_ranks(tmp_path: Path, script: str, hvdkit: Hvdkit) -> None:
    path = ROOT / "tests" / "horovod_scripts" / f"train_{script}.py"
    settings = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "HOROVOD_IDLE_CYCLE_TIME": "100"}
    options = OPTIONS if script in ("mnist_pytorch", "mnist_mxnet") else ()
    done = hvdkit("launch", "-np", 2, "--out", "run", path, *options, timeout=280, **settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = dict(re.findall(r"trained (\d) (\S+ \S+)$", done.stdout, re.MULTILINE))
    assert set(found) == {"0", "1"}, done.stdout[-2000:]
    accuracy, _ = map(float, found["0"].split())
    assert accuracy > 0.9, found
    assert found["0"] == found["1"], "the ranks have different weights, but saw different data"
    assert options or list(tmp_path.glob("checkpoint*")), "rank 0 saves the model"
