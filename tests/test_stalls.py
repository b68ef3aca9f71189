"""Collectives that only some ranks entered: what Horovod prints, and the error that the launcher makes of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdkit.heartbeat import DISK
from hvdkit.launch import supervise
from hvdkit.launch.agent.output import VARIABLE, OutputReader, without
from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.diagnosis.stalls import shown
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import HANG_SHARE, STACKS, ElasticBounds, Job
from hvdkit.launch.launchers import elastic

pytestmark = pytest.mark.check

PRINTED = b"""step 7
[2026-11-23 18:00:00.123456: W /build/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be \
reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 11 seconds.
Missing ranks:
1: [allreduce.a, allreduce.b[0], allreduce.c ...]
2!: [allreduce.a]
epoch 1
3: [nothing that the inspector said]
"""
NAMES = {1: ["allreduce.a", "allreduce.b[0]", "allreduce.c"], 2: ["allreduce.a"]}


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_what_horovod_prints_is_found_however_it_is_cut(size: int) -> None:
    reader = OutputReader()
    found = [event for start in range(0, len(PRINTED), size) for event in reader.events(PRINTED[start : start + size])]
    assert found[-1] == ("stalled", {"missing": NAMES})


def test_lines_for_the_user_are_found_and_bounded() -> None:
    reader = OutputReader()
    assert list(reader.events(b"step 7\nhvdkit: rank 0 waits for the")) == []
    assert list(reader.events(b" disk\nshvdkit: x\n")) == [("said", {"text": "rank 0 waits for the disk"})]
    assert list(reader.events(PRINTED)) == [("stalled", {"missing": NAMES})]
    said = list(reader.events(b"hvdkit: " + b"." * 5000 + b"\n" + b"hvdkit: again\n" * 5000))
    assert len(said) < 1000 and max(len(facts["text"]) for _, facts in said) <= 1000


def test_other_output_says_nothing_and_takes_no_memory() -> None:
    reader = OutputReader()
    assert reader.events(b"1: [allreduce.a]\n\xff\xfe") == []
    for _ in range(100):
        assert reader.events(b"." * 65536) == []
    assert len(reader._unfinished) <= 65536


def test_a_log_is_shown_without_the_inspectors_messages() -> None:
    assert without(PRINTED.decode()) == "step 7\nepoch 1\n3: [nothing that the inspector said]\n"
    assert without(PRINTED.decode().replace("stall_inspector", "other")) == PRINTED.decode().replace(
        "stall_inspector", "other"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("allreduce.gradients", "allreduce 'gradients'"),
        ("grouped_allreduce.gradients.0", "allreduce 'gradients.0'"),
        ("HorovodAllgather_sizes_0", "allgather 'sizes_0'"),
        ("gradients", "collective 'gradients'"),
    ],
)
def test_a_tensor_is_named_with_its_collective(name: str, said: str) -> None:
    assert shown(name) == said


def test_what_a_rank_says_is_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(tmp_path)
    ranks.note("said", 0, text="the disk\x1b[2J is full")
    assert capsys.readouterr().err == "'the disk\\x1b[2J is full'\n"


def test_a_wait_for_the_disk_of_rank_0_is_no_hang_unless_a_rank_is_frozen(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in (1, 2, 3):
        ranks.hung(rank, DISK, *WAITS)
    assert not ranks.ranks.hangs and not ranks.ranks.failed
    frozen = {"step": 7, "phase": DISK, "seconds": 50.0, "frozen": True, "frames": []}
    ranks.note("hung", 2, **frozen)
    ranks.hung(0, "checkpoint", *WAITS)
    assert ranks.ranks.hangs.keys() == {"rank-0", "rank-2"}
    assert ranks.fault().rank == 2


@pytest.mark.parametrize("step", [None, 0, 7])
def test_before_the_first_update_ranks_may_wait_for_one_that_compiles(tmp_path: Path, step: int | None) -> None:
    """No hang is reported of a rank that computes without a heartbeat, for ten timeouts."""
    ranks = Ranks(tmp_path)
    ranks.now = time.monotonic() - 100.0
    for rank in range(4):
        ranks.started(rank)
    for rank in (0, 1, 3):
        ranks.hung(rank, "train step", *WAITS, step=step)
    assert ranks.ranks.failed is (step == 7)
    ranks.ranks.hangs["rank-1"] = replace(ranks.ranks.hangs["rank-1"], frozen=True)
    assert ranks.ranks.failed, "a frozen rank does not compile"
    ranks.ranks.hangs["rank-1"] = replace(ranks.ranks.hangs["rank-1"], frozen=False)
    ranks.hung(2, "train step", *WAITS, step=step)
    assert ranks.ranks.failed, "they wait for each other"


class Ranks:
    """Four ranks on two hosts, and what their agents report, ten seconds after each other."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.job = Job(Path("python"), [], 4, [Host("h1", 2), Host("h2", 2)], {}, folder)
        self.ranks = supervise._Ranks(self.job)

    def note(self, event: str, rank: int, **facts: Any) -> None:
        self.now += 10
        self.ranks.note({"event": event, "rank": rank, "name": f"rank-{rank}", "clock": self.now} | facts, self.now)

    def started(self, rank: int) -> None:
        self.ranks.note({"event": "started", "rank": rank, "name": f"rank-{rank}", "pid": 1}, self.now)

    def hung(self, rank: int, phase: str, *frames: str, step: int | None = 7) -> None:
        self.note("hung", rank, step=step, phase=phase, seconds=50.0, frozen=False, frames=frames)

    def ended(self, rank: int, activity: dict[str, Any] | None = None) -> None:
        facts = {"exit_code": None, "signal": 15, "stopped": True, "frozen": False, "after_stop": False, "tail": ""}
        facts |= {"seconds": 5.0, "failed_at": self.now, "failure": None, "log_error": None, "host": "?"}
        self.note("ended", rank, activity=activity, **facts)

    def fault(self) -> RankFailure:
        for rank in range(4):
            if f"rank-{rank}" not in self.ranks.ends:
                self.ended(rank)
        found = self.ranks.fault()
        assert isinstance(found, RankFailure)
        return found


WAITS = ("synchronize (/x/site-packages/horovod/torch/mpi_ops.py:1310)", "step (/home/me/train.py:40)")


def test_the_collective_is_named_with_who_waits_who_is_missing_and_where_they_are(tmp_path: Path) -> None:
    """Rank 2 evaluates, so it makes progress: what it does is known from when it is ended."""
    ranks = Ranks(tmp_path)
    for rank in (0, 1, 3):
        ranks.hung(rank, "step", *WAITS)
    ranks.note("stalled", 0, missing={"2": [f"allreduce.gradients_{number}of9" for number in range(1, 7)]})
    activity = {"step": 7, "phase": "evaluating", "frozen": False}
    ranks.ended(2, activity | {"frames": ["dot (/x/site-packages/numpy/core.py:9)", "check (/home/me/train.py:88)"]})
    error = ranks.fault()
    assert (error.rank, error.host, error.exit_status) == (2, "h2", 1)
    message = str(error)
    assert message.startswith(
        "allreduce 'gradients' waits: ranks 0, 1, 3 entered it, rank 2 on h2 did not; rank 2 on h2 proceeds at step 7, "
        "in phase 'evaluating', executing dot (/x/site-packages/numpy/core.py:9), called in check "
        "(/home/me/train.py:88); rank 0 on h1 waits in phase 'step', executing synchronize"
    ), message
    stacks = (tmp_path / STACKS).read_text()
    assert str(tmp_path / STACKS) in message
    assert [line.split()[1] for line in stacks.splitlines() if line.startswith("rank")] == ["0", "1", "2", "3"]
    assert "    check (/home/me/train.py:88)\n" in stacks


def test_each_side_of_a_wrong_order_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in range(4):
        ranks.hung(rank, "step", *WAITS)
    ranks.note("stalled", 0, missing={"1": ["allreduce.a"], "2": ["allreduce.a"], "0": ["allreduce.b"], "3": ["b"]})
    message = str(ranks.fault())
    assert "allreduce 'b' waits: ranks 1, 2, 3 entered it, rank 0 on h1 did not" in message
    assert "allreduce 'a' waits: ranks 0, 3 entered it, rank 1 on h1, rank 2 on h2 did not" in message
    assert "mpi_ops.py:1310), called in step (/home/me/train.py:40)" in message


def test_a_rank_that_was_slow_to_wait_has_entered_its_collective(tmp_path: Path) -> None:
    """Rank 0 came to its wait so late that it was ended before its agent reported a hang."""
    ranks = Ranks(tmp_path)
    for rank in (1, 2, 3):
        ranks.hung(rank, "step", *WAITS)
    ranks.note("stalled", 0, missing={"0": ["allreduce.b"], **{str(rank): ["allreduce.a"] for rank in (1, 2, 3)}})
    ranks.ended(0, {"step": 7, "phase": "step", "frozen": False, "frames": list(WAITS)})
    message = str(ranks.fault())
    assert "allreduce 'a' waits: rank 0 entered it, rank 1 on h1, rank 2 on h2, rank 3 on h2 did not" in message
    assert "allreduce 'b' waits: ranks 1, 2, 3 entered it, rank 0 on h1 did not" in message


def test_a_wait_that_was_over_before_the_hang_is_not_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.note("stalled", 0, missing={"2": ["allreduce.evaluation"]})
    ranks.now += 600
    ranks.hung(1, "step", "sleep (/home/me/train.py:12)")
    message = str(ranks.fault())
    assert message.startswith("rank 1 on h1 hangs at step 7: no progress for 50 s") and "evaluation" not in message


def test_a_rank_of_which_nothing_is_heard_is_named_beside_those_that_wait_for_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in (0, 1, 2):
        ranks.hung(rank, "end of step", "waitall (/x/site-packages/mxnet/ndarray.py:2)")
    ranks.ranks._stopped_at = ranks.now
    for rank in (0, 1, 2):
        ranks.ended(rank)
    assert "nothing is heard of rank 3 on h2: is its host there?" in str(ranks.ranks.fault())


def test_a_rank_that_has_not_begun_is_the_one_that_the_others_wait_for(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in (0, 1, 3):
        ranks.note("hung", rank, step=None, phase="starting", seconds=50.0, frozen=False, frames=["init (/x/b.py:1)"])
    error = ranks.fault()
    assert error.rank == 2 and "hang before its first step" in str(error)
    assert "rank 2 on h2 has not come so far" in str(error)


def test_an_elastic_run_names_it_before_it_ends_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on without the rank, so this is no error."""
    killed: list[str] = []
    monkeypatch.setattr(elastic._Workers, "_kill", lambda _, *names: killed.extend(names))
    job = Job(
        Path("python"), [], 2, [Host("localhost", 2)], {}, tmp_path, stall_timeout_s=1e-9, elastic=ElasticBounds(1, 2)
    )
    workers, began = elastic._Workers(job), time.monotonic() - 200.0
    for rank in range(2):
        report = {"rank": rank, "name": f"worker-localhost-{rank}", "host": "localhost", "clock": 1.0}
        facts = {"step": 3, "phase": "step", "seconds": 50.0, "frozen": False, "frames": WAITS[:1] if rank == 0 else []}
        workers.note(report | {"event": "started", "pid": 1}, began)
        workers.note(report | {"event": "hung"} | facts, began + 100.0)
    workers.note(
        {"event": "stalled", "rank": 0, "name": "worker-localhost-0", "missing": {"1": ["allreduce.a"]}}, began + 90.0
    )
    workers.enforce()
    said = capsys.readouterr().err
    assert killed == ["worker-localhost-1"]
    assert "allreduce 'a' waits: rank 0 entered it, rank 1 on localhost did not; worker-localhost-1 hangs: " in said


@pytest.mark.parametrize("timeout_s", [60.0, 600.0])
def test_horovod_names_a_collective_before_the_launcher_gives_up(tmp_path: Path, timeout_s: float) -> None:
    job = Job(Path("python"), [], 2, [Host("localhost", 2)], {}, tmp_path, stall_timeout_s=timeout_s)
    period_s = int(job.base_environment()[VARIABLE])
    assert 4 * period_s < 0.8 * HANG_SHARE * timeout_s < 6 * period_s


def test_a_users_own_period_and_no_limit_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Path("python"), [], 2, [Host("localhost", 2)], {}, tmp_path, stall_timeout_s=0)
    assert VARIABLE not in job.base_environment()
    monkeypatch.setenv(VARIABLE, "7")
    assert job.base_environment()[VARIABLE] == "7"
