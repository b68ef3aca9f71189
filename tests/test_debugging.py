"""docs/debugging.md: what each of its symptoms, made by a script of tests/debugging, is reported as."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from conftest import ROOT, Hvdkit

from hvdkit.results.train import read_metrics

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

SCRIPTS = ROOT / "tests" / "debugging"
HANG_S = 8


def train(hvdkit: Hvdkit, script: str, out: str, *words: object, np: int = 2) -> CompletedProcess[str]:
    command = ["train", SCRIPTS / "recipe.yaml", f"model.script={script}.py", "-np", np, "--out", out, *words]
    return hvdkit(*command, "--stall-timeout", HANG_S)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("one_rank_dies", "rank 1 on localhost was killed by SIGKILL"),
        ("out_of_memory", "out_of_memory.py, line 10, in fault: RuntimeError: .*allocate memory.*`torch.empty"),
        ("not_a_number", "the loss is no longer a number from step [0-9]+ on"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_cause(hvdkit: Hvdkit, script: str, told: str) -> None:
    done = train(hvdkit, script, "run", "epochs=2", "steps=null")
    assert done.returncode == 1 and re.search(told, done.stderr), done.stderr


def test_two_runs_that_should_be_alike(hvdkit: Hvdkit) -> None:
    for script in ("sound", "two_runs_differ"):
        for out in ("first", "second"):
            assert train(hvdkit, script, f"{script}-{out}", np=1).returncode == 0
        done = hvdkit("diff", f"{script}-first", f"{script}-second")
        if script == "sound":
            assert (done.returncode, "to the last bit at step 30" in done.stdout) == (0, True), done.stdout
        else:
            assert done.returncode == 1 and "settings: the same" in done.stdout
            assert re.search(r"the same at step \d+, loss differs first at step \d+", done.stdout), done.stdout


def test_a_leak_shows_in_the_metrics(hvdkit: Hvdkit, tmp_path: Path) -> None:
    grown: dict[str, Any] = {}
    for script in ("sound", "leak"):
        assert train(hvdkit, script, script, np=1).returncode == 0
        memory = [line.rss_mib or 0.0 for line in read_metrics(tmp_path / script / "metrics.jsonl")]
        grown[script] = memory[-2] - memory[9]
    assert grown["leak"] - grown["sound"] > 15, "a MiB a step over 20 steps"
