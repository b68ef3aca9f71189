"""What is known of one rank's end: its cause, kills by the kernel, clocks of other machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.heartbeat import lost_a_peer
from hvdkit.launch.agent import process_tree
from hvdkit.launch.agent.reports import boot_id
from hvdkit.launch.diagnosis import blame
from hvdkit.launch.diagnosis.exits import Cause, FailureRecord, RankEnd, RankFailure
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.streams import Clocks
from tests.test_blame import GLOO_TAIL, LOST_TAIL

pytestmark = pytest.mark.check


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (RankEnd(0, "h", exit_code=0), Cause.WELL),
        (RankEnd(0, "h", exit_code=3), Cause.OWN),
        (RankEnd(0, "h", signal="SIGTERM"), Cause.OWN),  # by somebody else than its agent
        (RankEnd(0, "h"), Cause.UNKNOWN),
        (RankEnd(0, "h", stopped=True), Cause.STOPPED),
        (RankEnd(0, "h", exit_code=0, stopped=True), Cause.STOPPED),
        (RankEnd(0, "h", signal="SIGTERM", stopped=True, outside=True), Cause.TAKEN),
        (RankEnd(0, "h", exit_code=0, stopped=True, outside=True), Cause.STOPPED),
        (RankEnd(0, "h", signal="SIGKILL", stopped=True, frozen=True), Cause.FROZEN),
        (RankEnd(0, "h", exit_code=0, record=FailureRecord("error", "boom", None)), Cause.OWN),
        (RankEnd(0, "h", exit_code=1, tail=LOST_TAIL), Cause.LOST),
        (RankEnd(0, "h", exit_code=1, tail=GLOO_TAIL), Cause.LOST),
        (RankEnd(0, "h", exit_code=1, tail="Timed out waiting 30000ms for recv operation to complete"), Cause.LOST),
        (RankEnd(0, "h", exit_code=1, tail="import horovod\nBrokenPipeError: Broken pipe"), Cause.PERHAPS_LOST),
        (RankEnd(0, "h", signal="SIGKILL", tail=LOST_TAIL), Cause.OWN),
        (RankEnd(0, "h", signal="SIGABRT", tail=LOST_TAIL), Cause.LOST),
    ],
)
def test_what_an_end_tells_of_its_cause(end: RankEnd, cause: Cause) -> None:
    assert end.cause is cause
    assert end.failed == (cause not in (Cause.FROZEN, Cause.STOPPED, Cause.WELL))


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (True, r"after 2.0 s \(by the kernel's out-of-memory killer: use a smaller batch_size \(.*, see `hvdkit"),
        (False, r"after 2.0 s \(sent by a user, or by another program; hvdkit has not sent it\)"),
        (None, r"after 2.0 s \(often the kernel's out-of-memory killer: see `dmesg`"),
    ],
)
def test_the_kernel_is_blamed_for_a_kill_only_where_it_has_killed(
    seen: bool | None, words: str, tmp_path: Path
) -> None:
    end = RankEnd(1, "h", signal="SIGKILL", seconds=2.0, out_of_memory=seen)
    job = Job(Path("python"), [], 2, [Host("h", 2)], {}, tmp_path)
    with pytest.raises(RankFailure, match=words):
        raise blame.failure(job, blame.Verdict(end))


def test_a_rank_that_was_ended_after_its_error_is_said_to_be_killed_by_nobody_else(tmp_path: Path) -> None:
    record = FailureRecord("error", "TypeError: no", None)
    end = RankEnd(0, "h", signal="SIGTERM", stopped=True, seconds=2.0, record=record)
    verdict = blame.judge([end, RankEnd(1, "h", exit_code=1, failed_at=3.0)])
    assert verdict is not None and end.cause is Cause.OWN
    job = Job(Path("python"), [], 2, [Host("h", 2)], {}, tmp_path)
    words = r"rank 0 on h failed: TypeError: no \(was ended with the others after 2.0 s\); all"
    with pytest.raises(RankFailure, match=words):
        raise blame.failure(job, blame.Verdict(end))


@pytest.mark.parametrize("recorded", [True, False])  # by a rank of hvdkit's, or seen in a program's output
@pytest.mark.parametrize("others", [0, 1, 2])  # ranks that have not ended
def test_a_wait_that_was_too_long_says_how_to_wait_longer(others: int, recorded: bool, tmp_path: Path) -> None:
    told = {True: "[/gloo/unbound_buffer.cc:82] Timed out waiting 30000ms for recv operation to complete", False: "x"}
    for late, message in told.items():
        record = FailureRecord("communication", message, 0) if recorded else None
        ends = [RankEnd(0, "h", exit_code=1, record=record, tail=f"HorovodInternalError: {message}")]
        ends += [RankEnd(rank, "h", exit_code=0, stopped=True) for rank in range(1, 1 + others)]
        verdict = blame.judge(ends)
        assert verdict
        job = Job(Path("python"), [], 3, [Host("h", 3)], {}, tmp_path)
        assert ("HOROVOD_GLOO_TIMEOUT_SECONDS=300" in str(blame.failure(job, verdict))) is late


def test_a_log_whose_end_was_not_reported_is_read_in_the_shared_folder(tmp_path: Path) -> None:
    """As of a rank that is reached by ssh, which ends before its agent."""
    job = Job(Path("python"), [], 2, [Host("h", 2)], {}, tmp_path)
    assert "rank-1.log on h, is empty" in str(blame.failure(job, blame.Verdict(RankEnd(1, "h"))))
    job.log(1).write_text("x" * 9000 + "\nstep 4\n")
    assert str(blame.failure(job, blame.Verdict(RankEnd(1, "h")))).endswith("\n    step 4")


VMSTAT = {"proc/vmstat": "nr_free_pages 7\noom_kill 3\n"}
GROUPED = {"proc/self/cgroup": "5:cpu:/a\n4:memory:/a/b\n0::/c\n", **VMSTAT}


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, None),
        (VMSTAT, 3),
        (GROUPED, 3),
        (GROUPED | {"sys/fs/cgroup/memory/a/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"}, 1),
        (GROUPED | {"sys/fs/cgroup/c/memory.events": "low 0\noom 9\noom_kill 2\noom_group_kill 0\n"}, 2),
        ({"proc/vmstat": "oom_kill\n"}, None),
    ],
)
def test_kills_by_the_kernel_are_counted(files: dict[str, str], count: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert process_tree.oom_kills(tmp_path) == count


def test_clocks_of_other_machines() -> None:
    """The report that took least time tells most; a clock of this boot needs none, however late its reports are."""
    clocks = Clocks()
    clocks.note("far", 50.0, "another boot", 1000.0)
    clocks.note("far", 60.0, "another boot", 1009.0)
    clocks.note("far", 70.0, "another boot", 1030.0)
    assert clocks.here("far", 80.0) == 1029.0
    clocks.note("here", 990.0, boot_id(), 1000.0)
    assert clocks.here("here", 991.0) == 991.0


class HorovodInternalError(RuntimeError):
    """As Horovod's own is called."""


def test_an_error_raised_while_a_lost_peer_is_handled_is_its_consequence() -> None:
    def caught(outer: BaseException, inner: BaseException, told: bool = True) -> BaseException:
        try:
            try:
                raise inner
            except RuntimeError:
                if told:
                    raise outer  # noqa: B904
                raise outer from None
        except BaseException as error:
            return error

    lost, own = HorovodInternalError("Horovod has been shut down"), ValueError("training failed")
    assert lost_a_peer(caught(own, lost))
    assert not lost_a_peer(caught(ValueError("training failed"), lost, told=False))
    assert not lost_a_peer(caught(ValueError("other"), HorovodInternalError("Mismatched allreduce tensor shapes")))
    assert not lost_a_peer(caught(ValueError("other"), RuntimeError("Connection refused")))
    assert replace(RankEnd(0, "h"), record=FailureRecord("communication", "x", None)).secondary
