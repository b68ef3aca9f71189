"""docs/troubleshooting.md: what each of its symptoms, made by a script of tests/debugging, is reported as."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from hvdkit.results.train import read_metrics
from tests.conftest import ROOT, Hvdkit

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

SCRIPTS = ROOT / "tests" / "debugging"
HANG_S = 12  # of the runs that have to wait for the watchdog


def train(hvdkit: Hvdkit, script: str, out: str, *words: object, np: int = 2) -> CompletedProcess[str]:
    command = ["train", SCRIPTS / "recipe.yaml", f"model.script={script}.py", "-np", np, "--out", out, *words]
    return hvdkit(*command)


@pytest.fixture
def hung(hvdkit: Hvdkit) -> dict[str, str]:
    """What is said of the runs that only the watchdog ends; they wait side by side."""
    scripts = ("hang_at_the_start", "hang_in_the_middle")
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda script: train(hvdkit, script, script, "--stall-timeout", HANG_S), scripts))
    assert [each.returncode for each in done] == [1, 1], [each.stderr for each in done]
    return {script: each.stderr for script, each in zip(scripts, done, strict=True)}


def test_a_hang_is_named_with_the_collective_and_where_each_rank_is(hung: dict[str, str], tmp_path: Path) -> None:
    start, middle = hung["hang_at_the_start"], hung["hang_in_the_middle"]
    assert "rank 0 on localhost hangs before its first step" in start, start
    assert "rank 1 on localhost has not come so far" in start, start
    assert "allreduce 'norm' waits: rank 0 entered it, rank 1 on localhost did not" in middle, middle
    assert re.search(r"called in fault \(\S+/hang_in_the_middle\.py:\d+\)", middle), middle
    stacks = (tmp_path / "hang_in_the_middle" / "logs" / "stacks.txt").read_text()
    assert stacks.count("rank ") == 2 and "hang_in_the_middle.py" in stacks


def test_tensors_that_do_not_fit_are_named(hvdkit: Hvdkit) -> None:
    done = train(hvdkit, "shapes_differ", "run")
    assert done.returncode == 1 and "shapes_differ.py, line 11, in fault" in done.stderr, done.stderr
    assert "allreduce.norm: rank 0: ALLREDUCE float32 [4]; rank 1: ALLREDUCE float32 [5]" in done.stderr, done.stderr


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
