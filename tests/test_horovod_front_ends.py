"""Horovod's own TensorFlow and Keras front ends under Keras 3 (hvdkit/runtimes/patches).

Two ranks run all cases of tests/horovod_front_ends.
"""

from __future__ import annotations

import re
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
    (front_end, name)
    for file in sorted(FOLDER.glob("*_cases.py"))
    for kind, name in re.findall(r"^@(case|once|plain)\ndef (\w+)", file.read_text(), re.MULTILINE)
    for front_end in FRONT_ENDS[kind]
]


@pytest.fixture(scope="module")
def outcomes(warm_runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], str]]:
    """For each rank, what became of each case of each front end."""
    folder = tmp_path_factory.mktemp("front-ends")
    # Where a case fails on one rank only, the other one does not wait for it for ever.
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDKIT_RUNTIMES", str(warm_runtimes))
        job = framework_job("keras", folder, FOLDER / "rank.py", "keras", HOROVOD_DYNAMIC_PROCESS_SETS="1", **limits)
    direct.run(job)
    return [_outcomes(folder / f"rank-{rank}.log") for rank in range(2)]


def _outcomes(log: Path) -> dict[tuple[str, str], str]:
    found = re.findall(r"^case (\S+) (\S+) (.*)$", log.read_text(), re.MULTILINE)
    return {(front_end, name): outcome for front_end, name, outcome in found}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("front_end", "name"), CASES)
def test_front_end(outcomes: list[dict[tuple[str, str], str]], front_end: str, name: str) -> None:
    for rank, of_rank in enumerate(outcomes):
        outcome = of_rank.get((front_end, name), "was not reached")
        assert outcome == "passed", f"rank {rank}: {outcome}"
