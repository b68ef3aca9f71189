"""The suite itself (tests/conftest.py): what a test leaves behind is a failure, and an interrupt leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import hygiene
from tests.conftest import ROOT
from tests.launching import wait_until

pytestmark = pytest.mark.timeout(180)

TESTS = """
import os, subprocess, sys, time
from collections.abc import Callable
from pathlib import Path

# A process of a session of its own, which a Ctrl-C on a terminal does not reach.
SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]

def test_leaves_a_process():
    subprocess.Popen(SLEEPER, start_new_session=True)

def test_waits():
    subprocess.Popen(SLEEPER, start_new_session=True)
    Path(os.environ["HVDKIT_TEST_STARTED"]).touch()
    time.sleep(300)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a suite of the tests above with our conftest; its processes have the folder in their environment."""
    (tmp_path / "test_them.py").write_text(TESTS)

    def start(chosen: str, *options: str, ends_s: str = "1") -> subprocess.Popen[str]:
        pytest_ = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path), "--timeout=60"]
        own = {
            "PYTHONPATH": str(ROOT),
            "HVDKIT_TEST_STARTED": str(tmp_path / "started"),
            "HVDKIT_TEST_ENDS_S": ends_s,
        }
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*pytest_, *options, "-k", chosen, str(tmp_path)], env=os.environ | own, **output)

    return start


def test_what_a_test_leaves_behind_is_a_failure(suite, tmp_path: Path) -> None:
    process = suite("leaves")
    out, _ = process.communicate(timeout=hygiene.patience(60))
    assert process.returncode == 1 and "1 error" in out and "time.sleep(300)" in out, out
    assert hygiene.started_by(str(tmp_path / "started"), "HVDKIT_TEST_STARTED") == []


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), (signal.SIGTERM, "0")])
def test_an_interrupt_leaves_no_process(number: signal.Signals, workers: str, suite, tmp_path: Path) -> None:
    """Nor does it wait until processes have ended by themselves."""
    started = tmp_path / "started"
    process = suite("waits", "-n", workers, ends_s="1000")
    try:
        assert wait_until(lambda: started.exists() or process.poll() is not None, 90)
        process.send_signal(number)  # to it alone, as `kill` does
        out, _ = process.communicate(timeout=hygiene.patience(60))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2 and "KeyboardInterrupt" in out, out
    assert hygiene.started_by(str(started), "HVDKIT_TEST_STARTED") == []
