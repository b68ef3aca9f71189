"""Supervision: small Python ranks that exit, raise, hang, fork and get killed. No Horovod is needed."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from hvdkit.errors import RequestError, RunError
from hvdkit.launch.agent.reports import SHARED
from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import AgentCommand, ElasticBounds, prepare
from hvdkit.launch.supervise import supervise
from tests import launching
from tests.launching import SOON_S, exits, gone_within, job, run_plain

pytestmark = pytest.mark.timeout(300)


def failure(folder: Path, script: str, mark: str, np: int = 2) -> RankFailure:
    """Run ranks of which one fails; what is told of it."""
    with pytest.raises(RankFailure) as caught:
        run_plain(job(folder, script, np, mark))
    return caught.value


LEAVES_FILES = """
import tempfile
file = tempfile.NamedTemporaryFile(delete=False)
folder = tempfile.mkdtemp()
open(os.path.join(folder, "inside"), "w").close()
own = os.path.dirname(file.name)
print(os.path.relpath(own, os.environ["HOME"]), oct(os.stat(own).st_mode & 0o777))
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        "open(os.environ['HOME'] + '/ready', 'w').close(); hang()",  # until it is ended: rank 1 has failed
    ],
)
def test_temporary_files_go_with_their_rank(
    end: str, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path))
    script = LEAVES_FILES + f"if rank == 0: {end or 'pass'}\n"
    if "ready" in end:
        script += (
            "else:\n    while not os.path.exists(os.environ['HOME'] + '/ready'): time.sleep(0.01)\n    sys.exit(1)"
        )
    with contextlib.suppress(RankFailure):
        run_plain(job(tmp_path / "logs", script, 2 if "ready" in end else 1, mark))
    told = (tmp_path / "logs" / "rank-0.log").read_text()
    assert told.startswith("tmp/hvdkit-rank-0-") and told.endswith(" 0o700\n"), told
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_rank_can_do_without_a_place_for_temporary_files(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    run_plain(job(tmp_path / "logs", "assert os.environ['TMPDIR'].endswith('nowhere')", 1, mark))


def test_all_is_well(tmp_path: Path, mark: str) -> None:
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 4:
            (tmp_path / "new" / "logs" / "ticked").touch()

    script = "print('out', rank); print('err', file=sys.stderr); wait_for('ticked')"
    run_plain(job(tmp_path / "new" / "logs", script, 3, mark), tick)
    for rank in range(3):
        log = tmp_path / "new" / "logs" / f"rank-{rank}.log"
        assert sorted(log.read_text().splitlines()) == ["err", f"out {rank}"]
    rows = exits(tmp_path / "new" / "logs")
    assert [(row["rank"], row["host"], row["exit_code"], row["signal"]) for row in rows] == [
        (rank, "localhost", 0, None) for rank in range(3)
    ]


class Failure(NamedTuple):
    """What ranks do; which is named with which exit code or signal, and what is said."""

    script: str
    code: int | None = None
    signal: str | None = None
    rank: int = 1
    said: str = ""
    other: str | None = None  # how rank 0 is ended, where it has to be


STAYS = "say(f'ready-{rank}'); wait_for('ready-0')\n"
GRANDCHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=%s)\n"
FAILURES = {
    "an exit code": Failure(
        STAYS + "print('bye'); sys.exit(3) if rank == 1 else hang()",
        code=3,
        said=r"^rank 1 on localhost ended with exit code 3(?s:.*)/rank-1.log, ends:\n    bye$",
        other="SIGTERM",
    ),
    # Started first, rank 0 fails as soon as rank 1 is gone and its agent has seen it.
    "the first of two": Failure("tell_pid(); rank == 1 and os._exit(11)\ngone(1); os._exit(10)", code=11),
    # As in life: rank 1 raises, and while its interpreter still tidies up, rank 0 loses it and ends first.
    "not a lost peer": Failure(
        """
if rank == 1:
    record("error", "ValueError: boom", step=12)
    say("raised")
    gone(0)
    sys.exit(3)
tell_pid()
wait_for("raised")
record("communication", "HorovodInternalError: connection closed")
sys.exit(1)
""",
        code=3,
        said=r"^rank 1 on localhost failed at step 12: ValueError: boom \(ended with exit code 3 after ",
    ),
    "not a lost peer by its log": Failure(
        """
tell_pid()
if rank == 1:
    gone(0)
    sys.exit(3)
print("horovod.common.exceptions.HorovodInternalError: Connection closed by peer")
sys.exit(1)
""",
        code=3,
    ),
    "a damaged record": Failure(
        """
with open(os.path.join(os.environ["HVDKIT_RANK_DIR"], f"rank-{rank}.failure.json"), "w") as file:
    file.write('[1, "half')
sys.exit(4) if rank == 0 else hang()
""",
        rank=0,
        code=4,
    ),
    "a record of an impossible time": Failure(
        """
rank == 0 or wait_for("rank-0.failure.json")
record("error", f"rank {rank}", at=time.monotonic() + 1e6)
rank == 0 or hang()
sys.exit(1)
""",
        rank=0,
        code=1,
    ),
    "killed": Failure(
        "os.kill(os.getpid(), 9) if rank == 1 else hang()", signal="SIGKILL", said="sent by a user", other="SIGTERM"
    ),
    "crashed": Failure(
        "os.kill(os.getpid(), 11) if rank == 1 else hang()", signal="SIGSEGV", said="^(?!(?s:.*)out-of-memory)"
    ),
    "its agent is killed": Failure("os.kill(os.getppid(), 9) if rank == 1 else None; hang()", signal="SIGKILL"),
    "the other ignores SIGTERM": Failure(
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {STAYS}sys.exit(5) if rank == 1 else hang()",
        code=5,
        other="SIGKILL",
    ),
    "a grandchild stays": Failure(f"{GRANDCHILD % False}{STAYS}sys.exit(rank)", code=1),
    "a daemon stays": Failure(f"{GRANDCHILD % True}{STAYS}sys.exit(rank)", code=1),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_rank_that_failed_is_named(name: str, tmp_path: Path, mark: str) -> None:
    wanted = FAILURES[name]
    error = failure(tmp_path, wanted.script, mark)
    assert (error.rank, error.exit_code, error.signal) == (wanted.rank, wanted.code, wanted.signal)
    assert (error.host, error.exit_status) == ("localhost", 1) and re.search(wanted.said, str(error)), str(error)
    rows = exits(tmp_path)
    assert (rows[error.rank]["exit_code"], rows[error.rank]["signal"]) == (wanted.code, wanted.signal)
    assert wanted.other is None or (rows[0]["signal"], rows[0]["stopped"]) == (wanted.other, True)
    assert gone_within(mark, SOON_S)  # nobody is left to wait for rank 1 where its agent was killed


def test_only_lost_peers_end_the_job_too(tmp_path: Path, mark: str) -> None:
    script = """
if rank == 1:
    say("ready")
    hang()
wait_for("ready")
record("communication", "gone")
sys.exit(1)
"""
    with pytest.raises(RankFailure) as caught:
        run_plain(replace(job(tmp_path, script, 2, mark), settle_s=0.5))
    # The witness is no culprit. Which rank it has lost is plain, as there is but one.
    assert str(caught.value).startswith(
        "rank 1 on localhost was lost by rank 0, and had not ended by itself; all ranks"
    )
    assert [(row["exit_code"], row["signal"]) for row in exits(tmp_path)] == [(1, None), (None, "SIGTERM")]


def test_a_wrong_request_found_by_ranks_is_told_alone(tmp_path: Path, mark: str) -> None:
    with pytest.raises(RequestError) as caught:
        run_plain(job(tmp_path, "record('request', 'batch_size: expected > 0'); sys.exit(2)", 2, mark))
    assert str(caught.value) == "batch_size: expected > 0"


def test_a_record_half_written_is_taken_away(tmp_path: Path, mark: str) -> None:
    script = """
open(os.path.join(os.environ["HVDKIT_RANK_DIR"], f".rank-{rank}.failure.json.x7c"), "w").write('{"ra')
wait_for(f".rank-{1 - rank}.failure.json.x7c")
os.kill(os.getpid(), signal.SIGKILL)
"""
    failure(tmp_path, script, mark)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exits.json", "rank-0.log", "rank-1.log"]


def test_a_rank_may_tidy_up_on_sigterm(tmp_path: Path, mark: str) -> None:
    script = """
def tidy(*_):
    time.sleep(0.5)
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, tidy)
say(f"ready-{rank}")
wait_for("ready-0")
sys.exit(5) if rank == 1 else hang()
"""
    with pytest.raises(RankFailure) as caught:
        run_plain(replace(job(tmp_path, script, 2, mark), grace_s=SOON_S))
    assert caught.value.rank == 1
    assert (tmp_path / "rank-0.log").read_text() == "saved\n"


def test_the_end_of_the_log_is_shown(tmp_path: Path, mark: str) -> None:
    script = "[print('line', i) for i in range(100)]; print('10%\\r50%\\r99%'); sys.exit(1)"
    lines = str(failure(tmp_path, script, mark, np=1)).splitlines()
    assert len(lines) == 16
    assert lines[-2:] == ["    line 99", "    99%"]
    assert (tmp_path / "rank-0.log").read_text().startswith("line 0\nline 1\n")


def test_a_log_that_cannot_be_written_costs_no_run(tmp_path: Path, mark: str) -> None:
    asked = job(tmp_path, "print('hello'); sys.exit(7)", 1, mark)
    (tmp_path / "rank-0.log").mkdir()
    with pytest.raises(RequestError, match="cannot be written"):
        prepare(asked)
    (tmp_path / "rank-0.log").rmdir()
    (tmp_path / "rank-0.log").symlink_to("/dev/full")

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(launching, "prepare", lambda job: None)
        error = stack.enter_context(pytest.raises(RankFailure))
        run_plain(asked)
    assert "hello" in str(error.value)
    assert "cut short: No space left on device" in str(error.value)


def test_old_traces_are_taken_away(tmp_path: Path, mark: str) -> None:
    for name in ("rank-0.log", "rank-7.log", "rank-0.failure.json", "exits.json", "result.json"):
        (tmp_path / name).write_text('{"time": 1, "kind": "error", "message": "old"}')
    run_plain(job(tmp_path, "", 1, mark))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exits.json", "rank-0.log", "result.json"]


def test_a_host_that_does_not_see_the_folder_starts_no_rank(tmp_path: Path, mark: str) -> None:
    """Told by a file that the launcher has made there, which goes with the job."""
    asked = replace(job(tmp_path / "logs", "print('ran')", 2, mark), hosts=[Host("elsewhere.invalid", 2)])
    run_plain(asked)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["exits.json", "rank-0.log", "rank-1.log"]
    prepare(asked)
    assert asked.mark is not None and asked.mark.exists()
    ranks = [{**asked.base_environment(), "HOROVOD_RANK": str(rank)} for rank in range(2)]
    ranks[1][SHARED] = str(tmp_path / "another" / asked.mark.name)
    with pytest.raises(
        RequestError, match=r"logs on \S+: not the launcher's folder; give --out a folder that all hosts"
    ):
        supervise(asked, [AgentCommand(rank, asked.command(), ranks[rank]) for rank in range(2)], None)
    assert exits(asked.log_dir)[1]["pid"] is None and not asked.mark.exists()


def test_where_all_ranks_run_here_nothing_is_asked(tmp_path: Path) -> None:
    assert job(tmp_path, "").mark is None
    assert replace(job(tmp_path, ""), elastic=ElasticBounds(1, 2)).mark is not None, "hosts may come"


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the interpreter is not there; build it"):
        prepare(job(tmp_path, "", python=str(tmp_path / "none")))
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        prepare(job(tmp_path / "file" / "logs", ""))


def test_an_interpreter_that_vanishes_is_named(tmp_path: Path, mark: str) -> None:
    python = tmp_path / "python"
    python.write_text("#!/nowhere/python\n")
    python.chmod(0o755)
    with pytest.raises(RunError, match=f"{python}: cannot be started: No such file"):
        run_plain(job(tmp_path, "", 1, mark, python=str(python)))


def test_an_error_of_on_tick_leaves_nothing(tmp_path: Path, mark: str) -> None:
    def tick() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_plain(job(tmp_path, "hang()", 2, mark), tick)


def test_much_output_comes_whole_off_the_main_thread_too(tmp_path: Path, mark: str) -> None:
    thread = threading.Thread(target=run_plain, args=(job(tmp_path, "print('x' * 5_000_000)", 1, mark),))
    thread.start()
    thread.join()
    assert (tmp_path / "rank-0.log").stat().st_size == 5_000_001
