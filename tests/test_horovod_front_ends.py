"""Horovod's own TensorFlow and Keras front ends under Keras 3 (hvdkit/runtimes/patches).

Two ranks run all cases of tests/horovod_front_ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.conftest import ROOT
from tests.launching import framework_job

pytestmark = pytest.mark.long

FOLDER = ROOT / "tests" / "horovod_front_ends"
FRONT_ENDS = {
    "case": ("horovod.keras", "horovod.tensorflow.keras"),
    "once": ("horovod.tensorflow.keras",),
    "plain": ("horovod.tensorflow",),
}
CASES = [
    pytest.param(front_end, name, marks=[pytest.mark.thorough] * (front_end == "horovod.keras"))
    for file in sorted(FOLDER.glob("*_cases.py"))
    for kind, name in re.findall(r"^@(case|once|plain)\ndef (\w+)", file.read_text(), re.MULTILINE)
    for front_end in FRONT_ENDS[kind]
]


@pytest.fixture(scope="module")
def outcomes(warm_runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, str]]]:
    """For each rank, what became of each case of a front end."""

    @cache
    def tried(front_end: str) -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp(front_end)
        # Where a case fails on one rank only, the other one does not wait for it for ever.
        more = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120"}
        more |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HVDKIT_RUNTIMES", str(warm_runtimes))
            job = framework_job("keras", folder, FOLDER / "rank.py", "keras", front_end, **more)
        direct.run(job)
        logs = [(folder / f"rank-{rank}.log").read_text() for rank in range(2)]
        return [dict(re.findall(r"^case (\S+) (.*)$", log, re.MULTILINE)) for log in logs]

    return tried


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("front_end", "name"), CASES)
def test_front_end(outcomes: Callable[[str], list[dict[str, str]]], front_end: str, name: str) -> None:
    for rank, of_rank in enumerate(outcomes(front_end)):
        outcome = of_rank.get(name, "was not reached")
        assert outcome == "passed", f"rank {rank}: {outcome}"
