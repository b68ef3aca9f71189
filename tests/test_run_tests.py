"""scripts/run_tests.py: it tells what tests leave behind, and leaves nothing itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import hygiene
import pytest
from conftest import ROOT
from launching import wait_until

from scripts import run_tests

pytestmark = pytest.mark.timeout(180)

TESTS = """
import os, subprocess, sys
import pytest

pytestmark = pytest.mark.check

# A process of a session of its own, which a Ctrl-C on a terminal does not reach.
SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]

@pytest.mark.parametrize("number", range(3))
def test_good(number):
    pass

def test_bad():
    assert False

def test_skipped():
    pytest.skip("not here")

def test_broken(no_such_fixture):
    pass

def test_leaves_a_process():
    subprocess.Popen(SLEEPER, start_new_session=True)

def test_waits(tmp_path):
    subprocess.Popen(SLEEPER, start_new_session=True)
    open(os.environ["STARTED"], "w").close()
    import time
    time.sleep(300)
"""


# The script, which waits as long as BEHIND_S says, a variable, for processes that do not end by themselves. Its tests
# without ranks do not step back: on a busy machine they would wait for as long as that is busy.
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from scripts import run_tests
run_tests.FAREWELL_S = run_tests.GONE_S = float(os.environ["BEHIND_S"])
run_tests.step_back = None
sys.exit(run_tests.main(sys.argv[1:]))
"""
SHORT = {"BEHIND_S": "1"}  # the sleepers above never end
LONG = {"BEHIND_S": str(hygiene.patience(20))}  # what pytest itself has started ends, however slow the machine is


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """As of `make check`; one case below takes both parts."""
    (tmp_path / "test_them.py").write_text(TESTS)
    return [sys.executable, "-c", SCRIPT, "--check", "-q", "--rootdir", str(tmp_path), str(tmp_path)]


def carrying(word: str) -> list[int]:
    """The processes that have the word in their environment, this one's excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("chosen", "said", "status"),
    [
        ("good", "3 passed", 0),
        ("good or bad or skipped or broken", "1 failed, 3 passed, 1 skipped", 1),
        ("none_of_them", "deselected", 0),
    ],
)
def test_the_status_is_that_of_the_part_that_fared_worst(
    chosen: str, said: str, status: int, command: list[str]
) -> None:
    """The first in two processes for each part, as always; the others in one."""
    whole = [word for word in command if word != "--check" or status]
    processes = [] if chosen == "good" else ["-n0"]
    done = subprocess.run([*whole, *processes, "-k", chosen], capture_output=True, text=True, env=os.environ | LONG)
    assert said in done.stdout and done.returncode == status, done.stdout
    assert ("test_them.py::test_bad" in done.stdout) == bool(status)


def test_tests_without_ranks_step_back() -> None:
    with subprocess.Popen(["sleep", "300"], preexec_fn=run_tests.step_back) as process:
        try:
            assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
            assert os.getsid(process.pid) == process.pid
        finally:
            process.kill()


def test_what_a_test_leaves_behind_is_a_failure(command: list[str], tmp_path: Path) -> None:
    mine = {"BEHIND": tmp_path.name, **SHORT}
    done = subprocess.run([*command, "-n0", "-k", "leaves"], capture_output=True, text=True, env=os.environ | mine)
    assert done.returncode == 1
    assert "1 passed" in done.stdout
    assert "left behind by a test, and killed: " in done.stdout and "time.sleep(300)" in done.stdout
    assert carrying(f"BEHIND={tmp_path.name}") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(number: signal.Signals, command: list[str], tmp_path: Path) -> None:
    started = tmp_path / "started"
    mine = {"STARTED": str(started), **SHORT}
    process = subprocess.Popen(
        [*command, "-k", "waits"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | mine
    )
    try:
        assert wait_until(lambda: started.exists() or process.poll() is not None, 90)
        process.send_signal(number)  # to it alone, as `kill` does; it tells the others
        out, _ = process.communicate(timeout=hygiene.patience(60))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, out
    assert out.splitlines()[-1] == "interrupted; all processes of the tests are gone"
    assert carrying(f"STARTED={started}") == []
