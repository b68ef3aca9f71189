"""A launcher that is ended itself, by every signal: nothing of its ranks is left. No Horovod is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.launch.job import GRACE_S
from tests import launching
from tests.launching import SOON_S, exits, gone_within, marked, wait_until

pytestmark = pytest.mark.timeout(300)

# A launcher that is a process of its own, to be killed.
LAUNCHER = """
import sys
from dataclasses import replace
from pathlib import Path
from hvdkit.errors import HvdkitError
from launching import job, run_plain
try:
    run_plain(replace(job(Path(sys.argv[1]), sys.argv[2], 2, sys.argv[3]), grace_s=float(sys.argv[4])))
except KeyboardInterrupt:
    sys.exit(130)
except HvdkitError as error:
    print(error)
    sys.exit(error.exit_status)
"""

GRANDCHILDREN = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
hang()
"""


def launched(
    folder: Path, mark: str, grace_s: float = GRACE_S, script: str = GRANDCHILDREN, nohup: bool = False
) -> subprocess.Popen[str]:
    """The launcher, once all that belongs to it is there; it ignores SIGHUP only where `nohup` says so."""
    here = Path(__file__).parent
    hangup = signal.SIG_IGN if nohup else signal.SIG_DFL  # whatever this process was started with
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), script, mark, str(grace_s)],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}", launching.MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    assert wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), SOON_S)
    return launcher


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGHUP, 129)]
)
def test_a_launcher_that_is_ended_leaves_nothing(tmp_path: Path, mark: str, number: int, status: int) -> None:
    launcher = launched(tmp_path, mark)
    assert len(marked(mark)) == 7  # the launcher, two agents, two ranks, two grandchildren
    launcher.send_signal(number)
    assert gone_within(mark, SOON_S)
    said, _ = launcher.communicate(timeout=SOON_S)
    assert launcher.returncode == status
    assert "Traceback" not in said


def test_a_launcher_under_nohup_goes_on_without_its_terminal(tmp_path: Path, mark: str) -> None:
    launcher = launched(tmp_path, mark, script="print('ready'); wait_for('enough')", nohup=True)
    launcher.send_signal(signal.SIGHUP)
    (tmp_path / "enough").touch()
    said, _ = launcher.communicate(timeout=SOON_S)
    assert (launcher.returncode, said) == (0, "")
    assert [row["exit_code"] for row in exits(tmp_path)] == [0, 0]


def test_a_second_ctrl_c_waits_for_nobody(tmp_path: Path, mark: str) -> None:
    launcher = launched(tmp_path, mark, grace_s=10.0 * SOON_S)
    launcher.send_signal(signal.SIGINT)
    assert wait_until(lambda: len(marked(mark)) == 4, SOON_S)  # rank 1 obeys; rank 0 has its grace, as its own have
    launcher.send_signal(signal.SIGINT)
    assert gone_within(mark, SOON_S)
    assert launcher.wait(SOON_S) == 130
