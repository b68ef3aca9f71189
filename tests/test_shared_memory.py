"""Ranks that end while Horovod's collectives are in shared memory (hvdkit/runtimes/patches); what these give is in
tests/test_shared_memory_bits.py."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.errors import RunError
from hvdkit.launch.launchers import direct
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import ROOT, run
from tests.launching import framework_job

pytestmark = pytest.mark.long

# Rank 1 ends, or stops, at some moment of a stream of collectives; rank 0 tells what it hears.
CUT_OFF = """
import os, pathlib, random, signal, sys, threading, time
import torch
import horovod.torch as hvd

# Both have imported: Gloo's short timeout is not for that.
here = pathlib.Path(__file__).parent
(here / f"ready-{os.environ['HOROVOD_RANK']}").touch()
while len([*here.glob("ready-*")]) < 2:
    time.sleep(0.01)
hvd.init()
assert hvd.mpi_ops._basics.shared_memory_ranks() == hvd.size()
drawn, lengths = random.Random(0), random.Random(1)
if hvd.rank() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends a rank that has lost another one
else:
    threading.Timer(drawn.random(), os.kill, (os.getpid(), getattr(signal, sys.argv[1]))).start()
try:
    for turn in range(1_000_000):
        hvd.allreduce_(torch.ones(lengths.choice((1, 1_000, 300_000, 3_000_000))), name=f"turn.{turn % 50}")
except hvd.mpi_ops.HorovodInternalError as error:
    sys.exit(f"told: {error}")
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("signal", "timeout_s", "words"),
    [("SIGKILL", 60, "Connection closed by peer: rank 1"), ("SIGSTOP", 8, "Timed out waiting 8000ms for rank 1")],
)
def test_a_rank_that_ends_or_stops_is_told_to_the_other(
    tmp_path: Path, signal: str, timeout_s: int, words: str
) -> None:
    (tmp_path / "rank.py").write_text(CUT_OFF)
    patience = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(timeout_s)}
    job = framework_job("pytorch", tmp_path, tmp_path / "rank.py", signal, **patience)
    with pytest.raises(RunError):
        direct.run(replace(job, settle_s=1.0))
    said = job.log(0).read_text()
    assert "told: Horovod" in said and words in said, said
    assert not [*Path("/dev/shm").glob("*horovod*")], "other files there are other programs'"


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("phase", "gloo_s"), [("work", 30), ("start", 3)])
def test_100_kills(tmp_path: Path, phase: str, gloo_s: int) -> None:
    """While Horovod starts, a rank that waits for another one's address has but Gloo's timeout."""
    (tmp_path / "tmp").mkdir()
    command = [str(find("pytorch").python), str(ROOT / "tests" / "faults" / "kills.py"), "SIGKILL", phase, "100"]
    added = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_s), "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    done = run([*command, str(tmp_path / "turns")], 900, env={**os.environ, **added})
    assert done.returncode == 0, done.stderr
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(turns) == 100
    assert max(turn["s"] for turn in turns) < hygiene.patience(10)
    assert phase == "start" or all(turn["told"] for turn in turns)
    assert not [*(tmp_path / "tmp").iterdir()]
