"""Who is to blame: decided by evidence, whatever arrives first. Without Horovod, over all orders of arrival."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdkit.errors import RequestError
from hvdkit.launch import agents, supervise
from hvdkit.launch.agent import watchdog
from hvdkit.launch.diagnosis import blame
from hvdkit.launch.diagnosis.exits import RankEnd, RankFailure
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import ElasticBounds, Job
from hvdkit.launch.launchers import elastic

pytestmark = pytest.mark.check

LOST_TAIL = (
    "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception"
)
GLOO_TAIL = "Traceback …\n[/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:4242: Connection reset by peer\n"
SETTLE_S = 10.0
STOPPED = {"exit_code": None, "signal": 15, "stopped": True, "after_stop": True}


def said(kind: str, message: str = "boom") -> dict[str, Any]:
    return {"exit_code": 1, "failure": {"kind": kind, "message": message, "step": 3}}


# What an agent reports of a rank that failed by itself.
GUILTY: dict[str, dict[str, Any]] = {
    "own exit code": {"exit_code": 3},
    "own exit code behind a traceback": {"exit_code": 1, "tail": "Traceback …\nValueError: upside down\n"},
    "killed": {"signal": 9},
    "killed behind a word of a lost peer": {"signal": 9, "tail": LOST_TAIL},
    "crashed": {"signal": 11, "tail": "Fatal Python error: Segmentation fault"},
    "error record": said("error"),
    "error record with a word of a lost peer": said("error", LOST_TAIL) | {"tail": LOST_TAIL},
    "request record": said("request"),
}
# What it reports of one that ends for another's sake, or well.
WITNESSES: dict[str, dict[str, Any]] = {
    "communication record": said("communication", "Connection closed by peer"),
    "word of a lost peer": {"exit_code": 1, "tail": LOST_TAIL},
    "word of Gloo's, aborted": {"signal": 6, "tail": f"terminate called\n  what(): {GLOO_TAIL}"},
    "word of some connection": {"exit_code": 1, "tail": "ConnectionError: Connection refused\n"},
    "well": {"exit_code": 0},
    "runs on": {},  # until it is stopped
}


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (agents, supervise):
        monkeypatch.setattr(module, "time", clock)
    return clock


def job(np: int, folder: Path = Path("logs")) -> Job:
    return Job(Path("python"), [], np, [Host("localhost", np)], {}, folder, settle_s=SETTLE_S)


def report(rank: int, failed_at: float, facts: dict[str, Any]) -> dict[str, Any]:
    """An agent's report of an end."""
    record = {"exit_code": None, "signal": None, "stopped": False, "frozen": False, "after_stop": False, "tail": ""}
    record |= {"seconds": 5.0, "failed_at": failed_at, "failure": None, "log_error": None, "host": "localhost"}
    return {"event": "ended", "rank": rank, "name": f"rank-{rank}", "clock": failed_at} | record | facts


def told(
    clock: Clock,
    natural: dict[int, dict[str, Any] | None],
    order: tuple[int, ...],
    apart_s: float = 0.01,
    on_their_way: bool = False,
    when_stopped: dict[int, dict[str, Any] | None] | None = None,
) -> tuple[int, str]:
    """Whom the launcher blames, and in which words, if the ranks' ends come in this order.

    `natural` is how each rank ends if nobody stops it (None: not by itself). Once the launcher stops the ranks, those
    that have not ended end as `when_stopped` says (None: nothing is ever heard of it), else by SIGTERM, unless all
    reports are `on_their_way` by then.
    """
    ranks = supervise._Ranks(job(len(natural)))
    stop_at = None
    for rank in (rank for rank in order if natural[rank] is not None):
        clock.now += apart_s
        if ranks.must_stop:
            ranks.stop()
            if not on_their_way:
                break
        ranks.note(natural[rank] or {}, clock.now)
        stop_at = clock.now
    while not ranks.must_stop and not ranks.all_gone and ranks._stopped_at is None:
        assert stop_at is not None and clock.now < stop_at + 2 * SETTLE_S, "it waits for ever"
        clock.now += SETTLE_S / 4
    ranks.stop()
    for rank in order:
        facts = {**dict.fromkeys(natural, STOPPED), **(when_stopped or {})}[rank]
        if f"rank-{rank}" not in ranks.ends and facts is not None:
            ranks.note(report(rank, clock.now, facts), clock.now)
    fault = ranks.fault()
    if isinstance(fault, RequestError):
        return -1, str(fault)
    assert isinstance(fault, RankFailure)
    return fault.rank, str(fault)


def companies(np: int) -> Iterator[tuple[str, ...]]:
    """Witnesses for all ranks but one, of which at least one has ended."""
    yield from (itertools.combinations_with_replacement if np < 4 else itertools.combinations)(WITNESSES, np - 1)


@pytest.mark.parametrize("late", [False, True], ids=["fails first", "leaves last"])
@pytest.mark.parametrize("np", [2, 3, 4])
@pytest.mark.parametrize("guilty", GUILTY)
def test_a_rank_that_failed_by_itself_is_blamed_in_every_order(clock: Clock, guilty: str, np: int, late: bool) -> None:
    """Earlier than those that lost it, or later, as one that leaves slowly; ranks that have not ended are stopped."""
    for company in companies(np):
        for place in (0, np - 1) if np < 4 else (np - 1,):
            kinds = [*company[:place], guilty, *company[place:]]
            facts = {**GUILTY, **WITNESSES}
            natural = {
                rank: report(rank, 900.0 + (5 * late if rank == place else rank), facts[kind]) if facts[kind] else None
                for rank, kind in enumerate(kinds)
            }
            said = {told(clock, natural, order, way) for order in orders(np) for way in (0.01, SETTLE_S / np / 2)}
            blamed = {rank for rank, _ in said}
            assert blamed == ({-1} if guilty == "request record" else {place}), (kinds, said)


def orders(np: int) -> list[tuple[int, ...]]:
    """All orders of arrival."""
    return list(itertools.permutations(range(np)))


@pytest.mark.parametrize("np", [2, 3, 4])
def test_the_earliest_of_several_failures_is_blamed_in_every_order(clock: Clock, np: int) -> None:
    kinds = [kind for kind in GUILTY if kind != "request record"]
    for chosen in itertools.combinations_with_replacement(kinds, np - 1):
        facts = [GUILTY[kind] for kind in chosen] + [WITNESSES["communication record"]]
        for first in range(np - 1):
            failed_at = [900.0 + (rank - first) % np for rank in range(np)]
            failed_at[np - 1] = 899.0  # a lost peer, before all others
            natural = {rank: report(rank, failed_at[rank], facts[rank]) for rank in range(np)}
            said = {told(clock, natural, order, on_their_way=True) for order in orders(np)}
            assert len(said) == 1 and {rank for rank, _ in said} == {first}, (chosen, said)


@pytest.mark.parametrize("np", [2, 3, 4])
@pytest.mark.parametrize("witness", ["communication record", "word of a lost peer", "word of Gloo's, aborted"])
@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (STOPPED, "was lost by"),
        (STOPPED | {"frozen": True}, "did not answer: it was frozen by a signal"),
        (STOPPED | {"exit_code": 3, "signal": None}, "was lost by"),
        (STOPPED | {"signal": 11}, "was lost by"),
        (STOPPED | said("error") | {"after_stop": False}, "failed at step 3: boom"),
        (STOPPED | said("error"), "was lost by"),
        (None, "nothing is known of its end"),
    ],
    ids=["runs on", "frozen", "exits when stopped", "crashes when stopped", "error before", "error after", "vanished"],
)
def test_the_one_rank_that_the_others_lost_is_blamed(
    clock: Clock, np: int, witness: str, lost: dict[str, Any] | None, words: str
) -> None:
    """It says nothing by itself until the launcher's patience is over."""
    for place in range(np):
        natural = {
            rank: None if rank == place else report(rank, 900.0 + rank, WITNESSES[witness]) for rank in range(np)
        }
        verdicts = {told(clock, natural, order, when_stopped={place: lost}) for order in orders(np)}
        assert len(verdicts) == 1, verdicts
        ((blamed, message),) = verdicts
        assert blamed == place and words in message and message.startswith(f"rank {place} on localhost "), message


def test_lost_peers_alone_are_told_with_all_that_they_may_have_lost(clock: Clock) -> None:
    natural = {
        0: report(0, 900.0, WITNESSES["word of a lost peer"]),
        1: None,
        2: report(2, 880.0, WITNESSES["well"]),
        3: None,
    }
    verdicts = {told(clock, natural, order) for order in orders(4)}
    ((blamed, message),) = verdicts
    assert blamed == 0
    assert message.startswith(
        "rank 0 on localhost ended with exit code 1 after 5.0 s; rank 1 on localhost had not ended by then, "
        "rank 3 on localhost had not ended by then, rank 2 on localhost ended with exit code 0 after 5.0 s; all ranks"
    )


def test_of_a_traceback_the_last_line_is_told(clock: Clock) -> None:
    why = 'MXNetError: Traceback (most recent call last):\n  File "a.cc"\nMXNetError: Failed to allocate CPU Memory\n'
    blamed, message = told(clock, {0: report(0, 900.0, said("error", why))}, (0,))
    assert blamed == 0 and "failed at step 3: MXNetError: Failed to allocate CPU Memory (ended" in message
    assert "; use a smaller batch_size" in message
    why = "ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\nValueError: odd\n"
    assert "failed at step 3: ValueError: odd (ended" in told(clock, {0: report(0, 900.0, said("error", why))}, (0,))[1]


def test_all_ranks_of_a_collective_that_does_not_fit_are_told(clock: Clock) -> None:
    """Whichever says so first; those of them that say nothing too."""
    why = "Mismatched. Tensor x: rank 0, 3: BROADCAST uint8 [2] from rank 0; rank 1: BROADCAST uint8 [3] from rank 0"
    natural = {0: None, 1: report(1, 900.0, said("error", why)), 2: None, 3: report(3, 901.0, said("error", why))}
    for order in orders(4):
        blamed, message = told(clock, natural, order)
        others = ", ".join(f"rank {rank} on localhost" for rank in (0, 1, 3) if rank != blamed)
        assert blamed in (1, 3) and f", in a collective with {others}; all ranks were ended" in message


def test_a_broken_connection_of_its_own_is_no_proof_that_another_rank_is_gone(clock: Clock) -> None:
    """With a rank that runs on, the one that failed is to blame; with one that Horovod's words acquit, it is too."""
    facts = {"exit_code": 3, "tail": "urllib3: Connection refused by the metrics server\nexiting\n"}
    for other in (None, report(1, 900.0, WITNESSES["word of a lost peer"])):
        verdicts = {told(clock, {0: report(0, 905.0, facts), 1: other}, order) for order in orders(2)}
        assert {rank for rank, _ in verdicts} == {0}, verdicts


def test_hangs_are_blamed_in_every_order(clock: Clock) -> None:
    where = {0: ("/site-packages/horovod/torch/mpi_ops.py:1", False), 1: ("step (train.py:3)", False), 2: ("", True)}
    for frozen in (False, True):
        names = range(3 if frozen else 2)
        said = set()
        for order in itertools.permutations(names):
            ranks = supervise._Ranks(job(len(names)))
            for rank in order:
                frame, held = where[rank]
                facts = {
                    "step": 7,
                    "phase": "step",
                    "seconds": 12.0,
                    "frozen": held,
                    "frames": [frame] if frame else [],
                }
                assert not ranks.must_stop
                ranks.note({"event": "hung", "rank": rank, "name": f"rank-{rank}", "clock": 1.0} | facts, clock.now)
            assert ranks.must_stop
            ranks.stop()
            for rank in order:
                ranks.note(report(rank, clock.now, STOPPED | {"frozen": where[rank][1]}), clock.now)
            said.add(str(ranks.fault()))
        (message,) = said
        assert message.startswith(f"rank {2 if frozen else 1} on localhost hangs at step 7"), message


def test_ranks_that_move_again_hang_no_more(clock: Clock) -> None:
    ranks = supervise._Ranks(job(2))
    facts = {"step": 7, "phase": "step", "seconds": 51.0, "frozen": False, "frames": []}
    for event in ("hung", "resumed"):
        for rank in range(2):
            ranks.note({"event": event, "rank": rank, "name": f"rank-{rank}", "clock": 1.0} | facts, clock.now)
        assert ranks.must_stop == (event == "hung")
    clock.now += 1000.0
    assert not ranks.must_stop


def test_a_rank_is_seen_to_stand_and_to_move_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog.Watchdog, "_frames", lambda *_: [])  # they are asked for by a signal
    watched = watchdog.Watchdog(tmp_path / "rank-0.beat", tmp_path / "rank-0.stack", os.getpid(), 5000.0)
    seen = []
    for beat, waited_s in (("1 0 a", 0), ("1 0 a", 4999), ("1 0 a", 2), ("1 0 a", 9999), ("2 1 b", 1), ("2 1 b", 1)):
        (tmp_path / "rank-0.beat").write_text(beat)
        clock.now += waited_s
        seen.append((watched.look() or ("nothing", {}))[0])
    assert seen == ["nothing", "nothing", "hung", "nothing", "resumed", "nothing"]


def test_a_host_that_is_cut_off_is_blamed_unless_a_rank_failed_before(clock: Clock) -> None:
    cut = {"event": "link down", "rank": 0, "name": "rank-0", "clock": 950.0, "interface": "eth0", "up": False}
    for failed_at, words in (
        (940.0, "rank 1 on localhost ended with exit code 3"),
        (948.0, "host localhost is cut off"),
    ):
        said = set()
        for order in itertools.permutations((cut, report(1, failed_at, GUILTY["own exit code"]))):
            ranks = supervise._Ranks(job(2))
            for each in order:
                ranks.note(each, clock.now)
            assert ranks.must_stop
            ranks.stop()
            ranks.note(report(0, clock.now, STOPPED), clock.now)
            said.add(str(ranks.fault()))
        assert len(said) == 1 and said.pop().startswith(words)


def test_a_rank_that_others_have_ended_is_named_with_those_that_they_may_have_lost(
    clock: Clock, tmp_path: Path
) -> None:
    """As where mpirun loses its way to another host: it ends its own ranks, and says why."""
    ranks = supervise._Ranks(job(2, tmp_path))
    ranks.note(report(0, 900.0, STOPPED | {"outside": True, "after_stop": False}), clock.now)
    assert ranks.must_stop
    ranks.stop()
    ranks.note(report(1, clock.now, STOPPED), clock.now)
    ranks.launcher_end = {"name": "mpirun", "exit_code": 1, "signal": None, "tail": "lost a daemon\n"}
    said = str(ranks.fault())
    assert said.startswith("rank 0 on localhost was ended after 5.0 s by a signal that hvdkit has not sent"), said
    assert "; rank 1 on localhost had not ended by then; " in said and said.endswith("ends:\n    lost a daemon"), said


def test_hosts_that_did_not_answer_for_a_while_are_no_fault_where_all_ranks_end_well(clock: Clock) -> None:
    ranks = supervise._Ranks(job(2))
    for rank in range(2):
        ranks.note(report(rank, 900.0, {"exit_code": 0, "address": "10.0.0.1", "unanswered": ["10.0.0.2"]}), clock.now)
    assert ranks.fault() is None


def test_an_agent_that_is_killed_behind_its_report_changes_nothing(clock: Clock) -> None:
    ranks = supervise._Ranks(job(1))
    ranks.note(report(0, 900.0, {"exit_code": 3}), clock.now)
    ranks.note(report(0, 901.0, {"signal": 9, "stopped": True}), clock.now)
    assert (ranks.all_ends()[0].exit_code, ranks.all_ends()[0].signal) == (3, None)


def test_an_elastic_run_ends_for_the_earliest_failure_of_a_rank_itself(clock: Clock) -> None:
    """Whatever comes first; ranks that were lost before, and those that Horovod sent away, are survived."""
    removed = {"exit_code": 1, "tail": "the host has been removed from elastic job"}
    ends = [
        report(0, 905.0, said("error", "later")),
        report(1, 903.0, said("error", "earlier")),
        report(2, 901.0, {"signal": 9}),
        report(3, 900.0, said("communication")),
        report(4, 899.0, removed),
    ]
    heard = set()
    for order in itertools.permutations(ends):
        workers = elastic._Workers(replace(job(5), elastic=ElasticBounds(1, 5)))
        for each in order:
            workers.note(each, clock.now)
        assert workers.must_stop
        heard.add(str(workers.fault()))
    assert len(heard) == 1 and heard.pop().startswith("rank 1 on localhost failed at step 3: earlier ")


def test_an_elastic_driver_that_gives_up_names_the_strongest_cause(clock: Clock) -> None:
    """Of a worker too that was started again in its place since."""
    heard = set()
    lost = [report(0, 899.0, WITNESSES["word of a lost peer"]), report(1, 901.0, {"signal": 9})]
    for order in itertools.permutations(lost):
        workers = elastic._Workers(replace(job(2), elastic=ElasticBounds(2, 2)))
        for each in order:
            workers.note(each, clock.now)
            workers.note({**each, "event": "started", "pid": 4_000_000 + each["rank"]}, clock.now)
        workers.launcher_end = {"exit_code": 1, "signal": None, "tail": ""}
        heard.add(str(workers.fault()))
    assert len(heard) == 1 and "the first lost: rank 1 on localhost was killed by SIGKILL" in heard.pop()


def test_patience_ends_with_the_last_rank(clock: Clock) -> None:
    lost = [RankEnd(rank, "h", exit_code=1, tail=LOST_TAIL, reported_at=100.0 + rank) for rank in range(2)]
    assert not blame.decided(lost, 3, 109.9, SETTLE_S)
    assert blame.decided(lost, 3, 110.0, SETTLE_S)
    assert blame.decided(lost, 2, 101.0, SETTLE_S)
    assert not blame.decided([RankEnd(0, "h", exit_code=0)], 2, 1e9, SETTLE_S)
