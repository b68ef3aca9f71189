"""The rules of elastic rounds under random schedules, in simulated time: no rank is started."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from hvdkit.launch.launchers.elastic_rounds import AGAIN, Place, Rounds, Worker

TICK_S, PROMISE_S = 0.1, 30.0
KILLED = 137


@dataclass(eq=False)
class Process:
    """A worker as it behaves: it starts, joins, connects, trains and commits, and notices that another one is gone."""

    worker: Worker
    ready_at: float
    round: int = 0  # that it is in
    until: float = 0.0  # it is connected, or notices that its round is over
    committed: int = 0
    dies_at: float = float("inf")


@dataclass
class Cluster:
    """Rounds, the processes of their workers, and a clock."""

    random: random.Random
    rounds: Rounds
    now: float = 1000.0
    processes: list[Process] = field(default_factory=list)
    bad: set[Place] = field(default_factory=set)  # places where each worker dies soon
    soon_s: float = 8.0
    updates: int = 0
    updated_at: float = 1000.0
    faults: list[str] = field(default_factory=list)
    notes: list[tuple[float, int, dict[str, Any] | None]] = field(default_factory=list)  # on their way: arrival, round
    updated: int = 0  # the last round with an update

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            for process in list(self.processes):
                if self.now >= process.dies_at:
                    self.kill(process)
            number = self.rounds.number
            for place in self.rounds.advance(self.now):
                process = Process(self.rounds.start(place, rename=True), self.now + self.random.uniform(2, 6))
                if place in self.bad:
                    process.dies_at = self.now + self.random.uniform(0, self.soon_s)
                self.processes.append(process)
            if self.rounds.number != number:
                self._begin_round()
            for process in list(self.processes):
                self._act(process)
            self._train()
            for note in [note for note in self.notes if note[0] <= self.now]:
                self.notes.remove(note)
                self.rounds.note(note[1], note[2], committed=False)

    def kill(self, process: Process, status: int = KILLED) -> None:
        self.processes.remove(process)
        self.rounds.end(process.worker, status, self.now)

    def _begin_round(self) -> None:
        members = [process for process in self.processes if process.worker in self.rounds.members]
        states = [process for process in members if process.committed]
        if self.rounds.fresh and any(process.committed for process in self.processes):
            self.faults.append(f"{self.now}: begun anew while a worker had a state")
        if states and max(process.committed for process in states) < max(each.committed for each in self.processes):
            self.faults.append(f"{self.now}: begun without the newest state")
        if len({slot.rank for slot in self.rounds.slots.values()}) != len(members):
            self.faults.append(f"{self.now}: {self.rounds.slots}")
        for process in members:
            process.round, process.until = self.rounds.number, self.now + self.random.uniform(0.1, 0.5)

    def _act(self, process: Process) -> None:
        worker, rounds = process.worker, self.rounds
        if worker.leaves:
            self.kill(process, 0)
        elif not process.round:
            if self.now >= process.ready_at and worker.joined_at is None:
                rounds.join(worker, self.now)
        elif rounds.number != process.round or rounds.over is not None:
            if not worker.connected:
                self.kill(process, AGAIN)
            elif process.ready_at != process.round + 0.5:  # it notices after a moment
                process.ready_at, process.until = process.round + 0.5, self.now + self.random.uniform(0, 2)
            elif self.now >= process.until:
                process.round, process.ready_at = 0, self.now
        elif not worker.connected and self.now >= process.until:
            worker.connected = True

    def _train(self) -> None:
        members = self.rounds.members
        if self.rounds.over is None and members and all(member.connected for member in members):
            if self.updated != self.rounds.number:
                self.updated, since = self.rounds.number, self.rounds.interrupted
                recovery = since and {
                    "np_before": since[2],
                    "np": len(members),
                    "seconds": self.now - since[0],
                    "step": self.updates,
                }
                self.notes.append((self.now + self.random.uniform(0, 1), self.rounds.number, recovery))
            self.updates, self.updated_at = self.updates + 1, self.now
            if self.random.random() < 0.2:
                self.rounds.note(self.rounds.number, None, committed=True)
                for process in self.processes:
                    if process.worker in members:
                        process.committed = self.updates


@pytest.mark.parametrize("seed", range(60))
def test_training_goes_on_after_any_schedule(seed: int) -> None:
    """Ranks are killed while others join, connect and recover; places come, go and die again and again."""
    draw = random.Random(seed)
    np, most = draw.randint(1, 4), draw.randint(4, 6)
    least = draw.randint(1, np)
    places = [(f"h{number}", 0) for number in range(most + 2)]
    rounds = Rounds(np, least, most, 600.0, 1000.0)
    cluster = Cluster(draw, rounds)
    offered = places[: max(np, draw.randint(np, most))]
    rounds.offer(offered)
    cluster.run(20)
    for _ in range(40):
        event = draw.choice(["kill", "kill", "kill", "first", "all", "offer", "take", "empty", "bad", "joining"])
        if event == "kill" and cluster.processes:
            cluster.kill(draw.choice(cluster.processes))
        elif event == "first" and rounds.members and rounds.members[0] in rounds.workers:
            cluster.kill(next(each for each in cluster.processes if each.worker is rounds.members[0]))
        elif event == "joining":
            new = [each for each in cluster.processes if not each.worker.round]
            if new:
                cluster.kill(new[0])
        elif event == "all":
            for process in list(cluster.processes):
                cluster.kill(process)
        elif event == "offer":
            offered = [*offered, *[place for place in places if place not in offered][:1]]
        elif event == "take" and len(offered) > least:
            taken = draw.choice(offered)
            offered = [place for place in offered if place != taken]
        elif event == "bad":
            cluster.bad = {draw.choice(places)} if len(offered) > least + 1 else set()
        if len([place for place in offered if place not in cluster.bad]) < least:
            cluster.bad.clear()
        rounds.offer([] if event == "empty" else offered)
        cluster.run(draw.choice([0.2, 0.5, 1, 2, 4]))
        if event == "empty":
            rounds.offer(offered)
        happened = cluster.now
        if draw.random() < 0.5:
            cluster.run(PROMISE_S)
            assert cluster.updated_at > happened, (seed, event, rounds, cluster.processes)
        assert not cluster.faults and rounds.failure is None, (cluster.faults, rounds)
    cluster.run(PROMISE_S)
    assert cluster.updated_at > cluster.now - 5
    chain = [(recovery["np_before"], recovery["np"]) for recovery in rounds.recoveries]
    assert chain and all(now == then for (_, now), (then, _) in itertools.pairwise(chain)), chain


def test_a_place_that_always_dies_is_not_tried_for_ever() -> None:
    """Where too few ranks are left without it."""
    rounds = Rounds(2, 2, 2, 600.0, 1000.0)
    cluster = Cluster(random.Random(0), rounds, bad={("b", 0)}, soon_s=1.0)
    rounds.offer([("a", 0), ("b", 0)])
    cluster.run(300)
    assert rounds.failure == "12 ranks were lost and nothing was committed in between"
    assert cluster.now > 1030


def test_a_place_that_always_dies_does_not_hold_up_the_others() -> None:
    """From the start on."""
    rounds = Rounds(3, 2, 3, 600.0, 1000.0)
    cluster = Cluster(random.Random(0), rounds, bad={("b", 0)}, soon_s=1.0)
    rounds.offer([("a", 0), ("b", 0), ("c", 0)])
    cluster.run(PROMISE_S)
    assert len(rounds.members) == 2 and cluster.updates and rounds.failure is None


def test_too_few_places_are_waited_for_aloud_and_not_for_ever() -> None:
    rounds = Rounds(2, 2, 4, 100.0, 1000.0)
    cluster = Cluster(random.Random(0), rounds)
    rounds.offer([("a", 0)])
    cluster.run(99)
    assert rounds.failure is None and 3 <= len(rounds.said) <= 5, rounds.said
    assert "0 of 2 ranks are there (-np), 1 are offered; it gives up in 98 s" in rounds.said[0]
    cluster.run(2)
    assert rounds.failure == "0 of 2 ranks are there after 100 s (HOROVOD_ELASTIC_TIMEOUT)"
