"""The launchers with real Horovod: a collective of two ranks, and the ends that only Horovod brings about."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.errors import HvdkitError, RequestError, RunError
from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS, horovodrun
from hvdkit.runtimes.store import find
from tests import launching
from tests.launching import SOON_S, exits, gone_within, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ALLREDUCE = """
from tests import bare_horovod as hvd
hvd.init()
assert (hvd.rank(), hvd.size()) == (rank, int(os.environ["HOROVOD_SIZE"]))
total = hvd.allreduce(hvd.rank() + 1)
print("sum", total, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), flush=True)
"""


@pytest.fixture(scope="module")
def python() -> str:
    return str(find("mxnet").python)


@pytest.fixture(params=["direct", "horovodrun", "mpirun"])
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI: sudo make cluster-check")
    return str(request.param)


def job(folder: Path, script: str, mark: str, python: str, np: int = 2) -> Job:
    return launching.job(folder, script, np, mark, python)


def test_two_ranks_reduce(tmp_path: Path, mark: str, python: str, launcher: str) -> None:
    folder = tmp_path / "it's a $(folder)"
    LAUNCHERS[launcher].run(job(folder, ALLREDUCE + "print(os.environ['HVDKIT_LAUNCHER'])", mark, python))
    for rank in range(2):
        assert (folder / f"rank-{rank}.log").read_text().splitlines() == [f"sum 3.0 {rank} 2 0 1", launcher]


def test_one_rank(tmp_path: Path, mark: str, python: str, launcher: str) -> None:
    LAUNCHERS[launcher].run(job(tmp_path, ALLREDUCE, mark, python, np=1))
    assert (tmp_path / "rank-0.log").read_text() == "sum 1.0 0 1 0 1\n"


def test_two_names_of_this_machine(tmp_path: Path, mark: str, python: str) -> None:
    asked = job(tmp_path, ALLREDUCE, mark, python)
    hosts = parse_hosts("localhost:1,127.0.0.1:1", 2)
    LAUNCHERS["direct"].run(Job(asked.python, asked.arguments, 2, hosts, asked.environment, tmp_path))
    assert (tmp_path / "rank-1.log").read_text() == "sum 3.0 0 1 1 2\n"


def test_a_rank_that_exits_between_collectives(tmp_path: Path, mark: str, python: str, launcher: str) -> None:
    # Rank 0 waits for rank 1 in the second allreduce and loses it. It ends first, by seconds: rank 1 has left Horovod
    # but still has an exit handler to run (those that came first run last). horovodrun would name rank 0.
    script = """
import atexit
if rank == 1:
    atexit.register(lambda: (gone(0), time.sleep(3)))
tell_pid()
"""
    script += ALLREDUCE + "sys.exit(3) if rank == 1 else hvd.allreduce(0)"
    with pytest.raises(RankFailure) as caught:
        LAUNCHERS[launcher].run(replace(job(tmp_path, script, mark, python), settle_s=SOON_S))
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    first, second = exits(tmp_path)
    assert (first["exit_code"], first["stopped"], second["stopped"]) == (1, False, False), "each ended by itself"


def test_an_agent_that_is_killed_under_horovodrun_is_missed(tmp_path: Path, mark: str, python: str) -> None:
    """And the rank with it; no other rank is blamed for what that does to it."""
    script = """
tell_pid()
if rank == 1:
    os.kill(os.getppid(), signal.SIGKILL)
    hang()
gone(1)
print("HorovodInternalError: Horovod has been shut down.")
sys.exit(1)
"""
    with pytest.raises(RankFailure) as caught:
        LAUNCHERS["horovodrun"].run(replace(job(tmp_path, script, mark, python), settle_s=SOON_S))
    assert (caught.value.rank, caught.value.signal) == (1, "SIGKILL")
    assert gone_within(mark, SOON_S)


def test_no_temporary_file_outlives_horovodrun(
    tmp_path: Path, mark: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    script = """
import tempfile
tempfile.mkdtemp()
say(f"ready-{rank}")
wait_for("ready-0")
sys.exit(3) if rank == 1 else hang()
"""
    with pytest.raises(RankFailure) as caught:
        LAUNCHERS["horovodrun"].run(job(tmp_path / "logs", script, mark, python))
    assert caught.value.exit_code == 3
    assert not list((tmp_path / "tmp").glob("hvdkit-rank-*"))


def test_a_rank_that_is_killed_between_collectives(tmp_path: Path, mark: str, python: str, launcher: str) -> None:
    script = ALLREDUCE + "\nwhile True:\n    hvd.allreduce(0)\n    rank and os.kill(os.getpid(), 9)"
    with pytest.raises(RankFailure) as caught:
        LAUNCHERS[launcher].run(job(tmp_path, script, mark, python))
    assert (caught.value.rank, caught.value.signal) == (1, "SIGKILL")


LAUNCH = """
import sys
from pathlib import Path
from hvdkit.launch.launchers import LAUNCHERS
from tests.launching import job
try:
    LAUNCHERS[sys.argv[1]].run(job(Path(sys.argv[2]), sys.argv[3], 2, sys.argv[4], sys.argv[5]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_ended_launcher_leaves_nothing(
    tmp_path: Path, mark: str, python: str, launcher: str, number: int, status: int
) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); hang()"
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, launcher, str(tmp_path), script, mark, python],
        env={**os.environ, "PYTHONPATH": str(launching.ROOT), launching.MARK: mark},
    )
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    assert wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), SOON_S)
    process.send_signal(number)
    assert gone_within(mark, SOON_S)
    assert process.wait(SOON_S) == status


def test_another_machine_is_not_for_direct(tmp_path: Path, python: str) -> None:
    asked = job(tmp_path / "new", "", "", python, np=1)
    elsewhere = Job(asked.python, [], 1, parse_hosts("no-such-host.invalid:1", 1), {}, asked.log_dir)
    with pytest.raises(RequestError, match=r"no-such-host.invalid is not this machine.*--launcher horovodrun"):
        LAUNCHERS["direct"].run(elsewhere)
    assert not asked.log_dir.exists()


# What horovodrun needs of ssh: a shell elsewhere, which goes on for a while when the connection breaks.
SSH = """#!{python}
import subprocess, sys
arguments, host = sys.argv[1:], None
while arguments[0].startswith("-") or host is None:
    if arguments[0].startswith("-"):
        del arguments[:2]
    else:
        host = arguments.pop(0)
assert "planted" not in str(sys.argv) and "SECRET" not in str(sys.argv)
child = subprocess.Popen(["/bin/sh", "-c", " ".join(arguments)], env={{"FAR_HOST": host}},
                         stdout=subprocess.PIPE, start_new_session=True)
while data := child.stdout.read1():
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
sys.exit(child.wait())
"""


def test_a_rank_on_another_host(tmp_path: Path, mark: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH.format(python=sys.executable))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))  # horovodrun notes there for an hour that a host was reached
    monkeypatch.setenv("MY_TOKEN", "planted $(id) 'value'\n")
    script = "print(os.environ.get('FAR_HOST'), repr(os.environ['MY_TOKEN'])); sys.exit(3) if rank == 1 else hang()"
    asked = job(tmp_path / "logs", script, mark, python)
    hosts = parse_hosts("localhost:1,far-host.invalid:1", 2)
    placed = horovodrun._places
    monkeypatch.setattr(horovodrun, "_places", lambda job: [*placed(job), "--network-interfaces", "lo"])
    with pytest.raises(RankFailure) as caught:
        LAUNCHERS["horovodrun"].run(replace(asked, hosts=hosts))
    assert (caught.value.rank, caught.value.host, caught.value.exit_code) == (1, "far-host.invalid", 3)
    token = os.environ["MY_TOKEN"]
    assert str(caught.value).endswith(f"    far-host.invalid {token!r}")


def test_an_interpreter_without_horovod(tmp_path: Path, mark: str, launcher: str) -> None:
    with pytest.raises(HvdkitError) as caught:
        LAUNCHERS[launcher].run(job(tmp_path, "", mark, sys.executable))
    if launcher != "horovodrun":
        assert "rendezvous server did not start: ModuleNotFoundError: No module named 'horovod'" in str(caught.value)
    else:
        assert "no horovodrun there" in str(caught.value)


def test_a_horovodrun_that_fails_by_itself(
    tmp_path: Path, mark: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovodrun, "_places", lambda job: ["--no-such-option"])
    with pytest.raises(RunError, match="horovodrun ended with exit code 2; nothing is known") as caught:
        LAUNCHERS["horovodrun"].run(job(tmp_path, "", mark, python))
    assert "rank 1 on localhost" in str(caught.value)
