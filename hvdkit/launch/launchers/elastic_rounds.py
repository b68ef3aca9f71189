"""Who trains in an elastic run, decided from what is there. No thread, no socket and no clock of its own.

A round is a group of workers that train together. It is over when one of them is lost, or when places come or go; then
each of its workers joins the next one. A worker is counted on only once it has joined: one that still starts holds up
nobody who trains, and one that dies meanwhile is not missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdkit.launch.slots import Slot, fill

Place = tuple[str, int]  # a host's name and a slot there

AGAIN = 75  # the status of a worker that could not connect to the others, as one was lost meanwhile
_ABORTED = 134  # Horovod has aborted it: by its shell's count, 128 + SIGABRT
STRAGGLER_S = 20.0  # how long a worker that has not noticed yet is waited for; it may be on a host that is gone
TOGETHER_S = 3.0  # how long new workers wait for others that start, so that training stops once for all of them
TRIES = 6  # workers that may be lost while nothing is committed, for each that there may be
LONGEST_REST_S = 8.0  # of a place that loses one after the other
SOON_S, SAY_S = 2.0, 30.0  # when a wait is reported first, and how often


@dataclass(eq=False)
class Worker:
    """A process at a place. Its own name for it, `key`, tells it from those that were there before."""

    place: Place
    key: str
    joined_at: float | None = None  # it waits for a round since then
    round: int = 0  # its last one; 0 for none
    holds: int = 0  # the last one of which it has a commit: what it has got from others it does not keep until then
    connected: bool = False  # to the others of that round
    leaves: bool = False  # it has been asked to


@dataclass
class Rounds:
    """The workers of a run that begins with `np` and continues with `min_np` to `max_np`. Times are in seconds.

    `over` says why the current round is over: `lost` or `hosts`; None while it trains. `failure` says why there will be
    no other one. `said` collects lines for people.
    """

    np: int
    min_np: int
    max_np: int
    patience_s: float
    over_at: float  # or when it was begun
    offered: list[Place] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)  # that live
    number: int = 0
    members: list[Worker] = field(default_factory=list)
    slots: dict[str, Slot] = field(default_factory=dict)  # of the members, by their keys
    over: str | None = "start"
    fresh: bool = True  # none of the members has a commit
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    interrupted: tuple[float, str, int] | None = None  # since when, why, and how many trained until then
    succeeded: bool = False
    failure: str | None = None
    said: list[str] = field(default_factory=list)
    _lost: dict[Place, float] = field(default_factory=dict)  # places that are not used again, and since when
    _tries: Counter[Place] = field(default_factory=Counter)  # workers lost there since the last commit
    _barren: int = 0  # workers lost since then, anywhere
    _most: int = 0  # places that have been offered at a time
    _said_at: float = 0.0
    _lives: Counter[Place] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._said_at = self.over_at - SAY_S + SOON_S

    def offer(self, places: Iterable[Place]) -> None:
        """These places are there now. One that was taken away and is offered again is as good as new."""
        self.offered = list(places)
        self._most = max(self._most, len(self.offered))
        self._lost = {place: since for place, since in self._lost.items() if place in self.offered}

    def start(self, place: Place, rename: bool) -> Worker:
        """A worker is being started there. With `rename` it gets another host's name than those before it."""
        self._lives[place] += 1
        host, slot = place
        if rename and self._lives[place] > 1:
            host = f"{host}.{self._lives[place]}"
        worker = Worker(place, f"{host}:{slot}")
        self.workers.append(worker)
        return worker

    def worker(self, key: str) -> Worker | None:
        """The living worker of that name."""
        return next((worker for worker in self.workers if worker.key == key), None)

    def join(self, worker: Worker, now: float) -> None:
        """It waits for a round: it is new, or its round is over for it."""
        if worker.joined_at is None:
            worker.joined_at = now
            if worker in self.members and self.over is None:
                self._end_round("lost", now)  # it has noticed before this process

    def end(self, worker: Worker, status: int, now: float) -> None:
        """It has ended with this exit status."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        if worker.leaves:
            return
        if status == 0 and (worker.round or not self.number):
            self.succeeded = True
            return
        connecting = worker in self.members and not all(member.connected for member in self.members)
        if worker in self.members and self.over in (None, "hosts"):
            self._end_round("lost", now)
        self._barren += 1
        if status == AGAIN or (status == _ABORTED and connecting):
            return  # the loss of another one took it along: its place is good
        self._lost[worker.place] = now
        self._tries[worker.place] += 1

    def note(self, number: int, recovery: dict[str, Any] | None, committed: bool) -> None:
        """The first worker of that round has made its first update, or kept its first state."""
        if number != self.number:
            return
        if committed:
            self._barren = 0
            self._tries.clear()
            for worker in self.members:
                worker.holds = number
            return
        # It may be over already, by the next loss or change.
        self.interrupted = (self.over_at, self.over, len(self.members)) if self.over else None
        if recovery is not None:
            self.recoveries.append(recovery)
            self.said.append(
                f"training continues with {recovery['np']} rank(s) after {recovery['seconds']:.1f} s: update "
                f"{recovery['step']} is done"
            )

    def advance(self, now: float) -> list[Place]:
        """Begin a round, or end it, where it is time. Returns the places in which workers are to be started."""
        if self.succeeded or self.failure:
            return []
        starts = self._places_to_start(now)
        if self.over is None:
            self._look_for_changes(now, bool(starts))
        elif not starts:
            self._form(now)
        if self.over is not None:
            self._wait(now, len(starts))
        return starts

    def _stays(self, worker: Worker) -> bool:
        """Whether its place is there. Where too few would be left they all stay as long as they live."""
        return worker.place in self.offered or len(self.offered) < self.min_np

    def _places_to_start(self, now: float) -> list[Place]:
        if self.number == 0 and not self.workers and not self._lost and len(self.offered) < self.np:
            return []
        held = {worker.place for worker in self.workers}
        active = sum(self._stays(worker) for worker in self.workers)
        starts = [place for place in self.offered if place not in held and place not in self._lost]
        starts = starts[: max(0, self.max_np - active)]
        for place in sorted(self._lost, key=lambda place: (self._tries[place], self._lost[place])):
            tries = self._tries[place]
            anew = not active or (self.number == 0 and tries < 2)  # nobody trains yet, or any more
            enough = max(self.np, len(self.members)) if anew else self.min_np
            if active + len(starts) >= enough or place in held:
                continue
            rest_s = min(2.0 ** (tries - 2), LONGEST_REST_S) if tries > 1 else 0.0
            if now >= self._lost[place] + rest_s:
                del self._lost[place]
                starts.append(place)
        return starts

    def _look_for_changes(self, now: float, starting: bool) -> None:
        """End the round where new workers are ready, or places of its workers are gone."""
        if not all(worker.connected for worker in self.members):
            return
        new = [worker for worker in self.workers if worker.joined_at is not None and self._stays(worker)]
        stay = [worker for worker in self.members if self._stays(worker)]
        gone = len(stay) < len(self.members) and len(stay) + len(new) >= self.min_np
        late = starting or any(worker.joined_at is None and worker not in self.members for worker in self.workers)
        ready = new and (not late or now >= min(worker.joined_at or now for worker in new) + TOGETHER_S)
        if gone or (ready and len(stay) < self.max_np):
            self._end_round("hosts", now)

    def _form(self, now: float) -> None:
        """Begin the next round, once all are there that have a state or, without any, that start."""
        joined = [worker for worker in self.workers if worker.joined_at is not None]
        staying = [worker for worker in joined if self._stays(worker)]
        newest = max((worker.holds for worker in joined), default=0)
        if newest and not any(worker.holds == newest for worker in staying):  # somebody has to hand the state over
            staying = [worker for worker in joined if worker.holds == newest][:1] + staying
        chosen = sorted(staying, key=lambda worker: -worker.holds)[: self.max_np]
        if len(chosen) < self.min_np:
            return
        stateless = not any(worker.holds for worker in chosen)
        missing = [worker for worker in self.workers if worker.joined_at is None]
        busy = [w for w in missing if w in self.members or (w.holds and stateless)]
        starting = [w for w in missing if not w.round and self._stays(w)] if stateless else []
        waited_s = now - max(self.over_at, min(worker.joined_at or now for worker in chosen))
        # They join at their next commit, which may take long. Nobody begins without the state that one of them has.
        if busy and (waited_s < STRAGGLER_S or self.over == "hosts" or (stateless and any(w.holds for w in busy))):
            return
        first = self.number == 0 and any(self._tries[worker.place] < 2 for worker in starting)
        if starting and (first or waited_s < TOGETHER_S):
            return
        for worker in joined:
            worker.leaves = worker not in chosen and not self._stays(worker)
        self.number += 1
        self.over, self.fresh = None, stateless
        hosts = Counter(worker.key.rpartition(":")[0] for worker in chosen)
        by_host = {host: [w for w in chosen if w.key.rpartition(":")[0] == host] for host in hosts}
        self.members = [worker for workers in by_host.values() for worker in workers]
        self.slots = dict(zip([worker.key for worker in self.members], fill(hosts.items(), len(chosen)), strict=True))
        for worker in self.members:
            worker.joined_at, worker.round, worker.connected = None, self.number, False

    def _end_round(self, why: str, now: float) -> None:
        if self.interrupted is None:
            self.interrupted = (now, why, len(self.members))
        self.over, self.over_at = why, now
        self._said_at = now - SAY_S + SOON_S

    def _wait(self, now: float, starts: int) -> None:
        """Tell who is waited for, and give up where that takes too long or cannot end."""
        if self.over == "hosts" and any(worker.joined_at is None for worker in self.members):
            self.over_at = now  # they train until their next commit
        there = sum(self._stays(worker) for worker in self.workers) + starts
        needed = self.np if self.number == 0 and not self.workers else self.min_np
        left_s = self.over_at + self.patience_s - now
        few = f"{there} of {needed} ranks are there" if there < needed else f"{there} ranks are starting or waiting"
        if self._barren >= TRIES * max(self.np, min(self._most, self.max_np)):
            self.failure = f"{self._barren} ranks were lost and nothing was committed in between"
        elif left_s <= 0:
            self.failure = f"{few} after {self.patience_s:g} s (HOROVOD_ELASTIC_TIMEOUT)"
        elif there < needed and now >= self._said_at + SAY_S:
            self._said_at = now
            what = "-np" if needed == self.np and self.number == 0 else "elastic.min_np"
            self.said.append(
                f"waiting for places: {few} ({what}), {len(self.offered)} are offered; it gives up in {left_s:.0f} s "
                "(HOROVOD_ELASTIC_TIMEOUT)"
            )
