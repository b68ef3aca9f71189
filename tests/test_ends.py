"""How ranks end: who is named first, the status, and the remedy. The table is data; a cell is a real run of two ranks.

HVDKIT_TEST_ALL_ENDS=1 runs every way to end, of rank 0, rank 1 and both, in every phase.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
from conftest import ROOT, Hvdkit

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

SCRIPT = ROOT / "tests" / "faults" / "ends.py"
# What the first line says of the rank that has ended so, once training has begun.
SAID = {
    "sys.exit(0)": r"failed at step \d+: .*SystemExit: 0; it left before its work was done",
    "sys.exit(3)": r"failed at step \d+: .*SystemExit: 3; .*\(ended with exit code 3 ",
    "sys.exit(text)": r"failed at step \d+: .*SystemExit: nothing left to learn",
    "os._exit(0)": r"ended with exit code 0 after [\d.]+ s, before its work was done",
    "os._exit(3)": r"ended with exit code 3 after",
    "speak": r"ended with exit code 3 after",
    "raise": r"failed at step \d+: .*ValueError: the seventh",
    "interrupt": r"failed at step \d+: KeyboardInterrupt: it got SIGINT, or its code raised it",
    "memory": r"failed at step \d+: .*MemoryError.*; use a smaller batch_size",
    **{name: f"was killed by {name} after" for name in ("SIGTERM", "SIGHUP", "SIGSEGV", "SIGABRT", "SIGBUS")},
    "SIGKILL": "was killed by SIGKILL after .*out-of-memory",
    "SIGXCPU": "was killed by SIGXCPU after .*ulimit -t",
}
WELL = {"close", "fork", "SIGPIPE"}  # training goes on: Python ignores SIGPIPE
PHASES = {"input": 4, "evaluation": 10, "checkpoint": 8}
CELLS = [
    ("1", "input", "os._exit(0)"),
    ("0,1", "input", "sys.exit(0)"),
    ("0", "checkpoint", "SIGHUP"),
    ("1", "evaluation", "sys.exit(3)"),
    ("1", "input", "speak"),
    ("1", "checkpoint", "memory"),
    ("0", "input", "close"),
    ("0", "input", "fork"),
]
if os.environ.get("HVDKIT_TEST_ALL_ENDS"):
    CELLS = list(itertools.product(("0", "1", "0,1"), PHASES, (*SAID, *sorted(WELL))))


@pytest.mark.parametrize(("ranks", "phase", "how"), CELLS)
def test_the_rank_that_ended_first_is_named_first(
    ranks: str, phase: str, how: str, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    words = [f"model.script={SCRIPT}", "-np", 2, "--out", "run", "checkpoint.every_steps=8"]
    planted = f"{ranks} {phase} {PHASES[phase]} {how}"
    done = hvdkit("train", ROOT / "tests" / "debugging" / "recipe.yaml", *words, PLANTED=planted)
    last = next((line for line in done.stderr.splitlines() if re.match(r"rank \d on localhost ", line)), "")
    if how in WELL:
        assert (done.returncode, last) == (0, ""), done.stderr
        assert (tmp_path / "run" / "result.json").exists()
        return
    assert done.returncode == 1, done.stderr
    assert not set("\x1b\x07\x9b\u202e") & set(done.stdout + done.stderr), "control characters stay off the terminal"
    assert re.match(f"rank [{ranks}] on localhost {SAID[how]}", last), done.stderr
    kept = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert ("continue with --resume" in done.stderr) == bool(kept), done.stderr
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_a_script_that_ends_before_it_trains(how: str, hvdkit: Hvdkit) -> None:
    recipe = ROOT / "tests" / "debugging" / "recipe.yaml"
    done = hvdkit("train", recipe, f"model.script={SCRIPT}", "-np", 2, "--out", "run", PLANTED=f"0,1 top 0 {how}")
    told = {"sys.exit(0)": (2, "SystemExit: 0; it left before"), "os._exit(0)": (1, "before its work was done")}[how]
    assert done.returncode == told[0] and told[1] in done.stderr, done.stderr
    assert "--resume" not in done.stderr
