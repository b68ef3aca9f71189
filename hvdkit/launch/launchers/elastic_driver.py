"""The driver of an elastic run: starts workers, and tells them in which rounds they train. Runs under a runtime's
interpreter.

usage: python elastic_driver.py SETTINGS COMMAND...

SETTINGS is JSON: `np` places to wait for, `min_np`, `max_np`, and `places`, a list of names, or `discovery`, a program
that prints host:slots a line as it does for horovodrun. COMMAND is started for each rank; it finds Horovod's variables
in its environment. With `cluster` true, COMMAND is a program that offers places on a cluster and starts ranks there
(elastic_places.py). Ends with status 0 where a worker has succeeded.

Workers ask over the HTTP of Horovod's rendezvous (elastic_line.py):

    GET join/KEY        the worker's next round: its numbers, what has happened so far, where commits are kept
    GET round/NUMBER    why the round is over
    PUT connected/KEY   Horovod is initialized
    PUT trained/NUMBER  its first update, as a recovery, or its first commit

The first two answer within a few seconds, `{}` where there is nothing to say yet. Horovod's own elastic driver counts
on a worker from when it is started. A loss meanwhile leaves all others waiting until Gloo aborts them.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    # The folder of a script comes first in sys.path: its files would hide what Horovod imports.
    del sys.path[0]


from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from hvdkit.launch.agent.reports import PROGRAM_RUNS, Reports
from hvdkit.launch.agent.task import VARIABLE
from hvdkit.launch.launchers.elastic_places import ClusterPlaces, Local
from hvdkit.launch.launchers.elastic_rounds import Place, Rounds, Worker
from hvdkit.launch.slots import Slot, horovod_environment

TIMEOUT_S = 600.0  # HOROVOD_ELASTIC_TIMEOUT
ANSWER_S = 5.0  # a request is answered within it
_TICK_S = 0.1
_DISCOVER_S = 1.0
_LEAVE_S = 10.0  # for the other workers to end, once one has succeeded

_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")

Start = Callable[[Slot, list[threading.Event]], "tuple[int, float]"]


class ElasticDriver:
    """Takes the place of Horovod's ElasticDriver, in horovodrun too: the public methods and `timeout` are its.

    `discovery` finds the places. With `rename`, a worker that is started where another was lost gets a host's name of
    its own, and so its own files.
    """

    def __init__(
        self,
        rendezvous: Any,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: float | None = None,
        rename: bool = False,
        **_: Any,
    ) -> None:
        self._rendezvous, self._discovery, self._rename = rendezvous, discovery, rename
        patience_s = float(timeout or os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or TIMEOUT_S)
        most = max_num_proc or sys.maxsize
        self._program = bool(os.environ.get(PROGRAM_RUNS))
        self._rounds = Rounds(min_num_proc, min_num_proc, most, patience_s, time.monotonic())
        self._changed = threading.Condition()
        self._ending: dict[str, threading.Event] = {}  # of each worker, by its key
        self._start: Start | None = None
        self._reports = Reports("driver")
        # Commits of the first rank, two in turn. They are gone with this process.
        names = [f"hvdkit-{secrets.token_hex(8)}" for _ in range(2)]
        self._kept = {f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}": name for name in names}
        threading.Thread(target=self._discover, daemon=True).start()

    def wait_for_available_slots(self, np: int, min_hosts: int = 1) -> Any:
        """Wait until there are so many slots; returns the hosts as Horovod describes them. Ends the process where it
        takes too long."""
        with self._changed:
            self._rounds.np = np
            while len(self._rounds.offered) < np:
                self._rounds.advance(time.monotonic())
                self._tell()
                self._changed.wait(_TICK_S)
            return SimpleNamespace(host_assignment_order=list(dict.fromkeys(host for host, _ in self._rounds.offered)))

    def start(self, np: int, start: Start) -> None:
        """Begin with `np` workers; `start` runs one to its end and returns its exit status."""
        self._rounds.np, self._start = np, start

    def get_results(self) -> Any:
        """Return when training is done. Ends the process where it cannot continue."""
        done_at = None
        with self._changed:
            while done_at is None or self._waits(done_at):
                number = self._rounds.number
                for place in self._rounds.advance(time.monotonic()):
                    self._begin(place)
                if self._rounds.number != number:
                    self._rendezvous.init(list(self._rounds.slots.values()))
                    self._reports.send("round", np=len(self._rounds.members), fresh=self._rounds.fresh)
                if self._rounds.number != number or self._rounds.over is not None:
                    self._changed.notify_all()
                self._tell()
                if self._rounds.succeeded and done_at is None:
                    done_at = time.monotonic()
                    self._end(worker for worker in self._rounds.workers if worker not in self._rounds.members)
                self._changed.wait(_TICK_S)
        return SimpleNamespace(error_message=None, worker_results={})

    def _waits(self, done_at: float) -> bool:
        """Whether to wait for workers that are left. A program's ranks may still write what they have trained."""
        works = self._program and any(worker in self._rounds.members for worker in self._rounds.workers)
        return works or bool(self._rounds.workers and time.monotonic() < done_at + _LEAVE_S)

    def stop(self) -> None:
        """End workers that are left."""
        until = time.monotonic() + _LEAVE_S
        with self._changed:
            self._end(self._rounds.workers)
            while self._rounds.workers and time.monotonic() < until:
                self._changed.wait(_TICK_S)

    def _end(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            self._ending[worker.key].set()

    def _tell(self) -> None:
        """Pass on what people are to know. Ends the process where the run has failed."""
        for line in self._rounds.said:
            self._reports.send("said", text=line)
        self._rounds.said.clear()
        if self._rounds.failure is not None:
            self._reports.send("gave up", text=self._rounds.failure)
            print(self._rounds.failure, flush=True)
            os._exit(1)  # the agents of workers end those

    def _discover(self) -> None:
        """Ask for the places again and again; where that fails they stay as they are."""
        while True:
            try:
                hosts = self._discovery.find_available_hosts_and_slots()
                with self._changed:
                    self._rounds.offer((host, slot) for host, slots in hosts.items() for slot in range(slots))
                    self._changed.notify_all()
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            time.sleep(_DISCOVER_S)

    def _begin(self, place: Place) -> None:
        """Start a worker. Its numbers are for its first messages: those of its round come when it joins."""
        worker = self._rounds.start(place, self._rename)
        host, _, local = worker.key.rpartition(":")
        index, size = len(self._rounds.workers) - 1, max(len(self._rounds.workers), self._rounds.np)
        here = max(int(local) + 1, min(size, sum(other == place[0] for other, _ in self._rounds.offered)))
        slot = Slot(host, index, size, int(local), here, 0, 1)
        event = self._ending[worker.key] = threading.Event()

        def run() -> None:
            assert self._start is not None
            try:
                status, _ = self._start(slot, [event])
            except Exception as error:  # its host has no address, say
                status = 1
                print(f"[{slot.rank}]<stderr>:{type(error).__name__}: {error}", flush=True)
            with self._changed:
                if not worker.round and not worker.leaves:
                    self._reports.send("unjoined", worker=f"worker-{host}-{local}", index=slot.rank, status=status)
                if self._program and self._rounds.succeeded and worker in self._rounds.members and status:
                    self._rounds.failure = f"{worker.key} ended with status {status} after another rank had ended well"
                self._rounds.end(worker, status, time.monotonic())
                self._changed.notify_all()

        threading.Thread(target=run, daemon=True).start()

    def numbers(self, key: str) -> bytes | None:
        """A member's numbers, as Horovod asks for them where it is initialized again; `key` is host:local_rank."""
        with self._changed:
            for slot in self._rounds.slots.values():
                if f"{slot.hostname}:{slot.local_rank}" == key:
                    return ",".join(str(getattr(slot, name)) for name in _NUMBERS).encode()
        return None

    def join(self, key: str) -> dict[str, Any]:
        """The next round of the worker of that key; empty where there is none yet."""
        with self._changed:
            worker = self._rounds.worker(key)
            if worker is not None:
                if self._program and self._rounds.succeeded and worker in self._rounds.members:
                    self._rounds.failure = "a rank ended with exit code 0 while others trained"
                self._rounds.join(worker, time.monotonic())
                self._changed.notify_all()
                self._changed.wait_for(lambda: worker.joined_at is None or worker.leaves, ANSWER_S)
            if worker is None or worker.leaves:
                return {"leaves": True}
            if worker.joined_at is not None:
                return {}
            slot, since = self._rounds.slots[key], self._rounds.interrupted
            return {
                "round": worker.round,
                "numbers": {name: getattr(slot, name) for name in _NUMBERS},
                "fresh": self._rounds.fresh,
                "recoveries": self._rounds.recoveries,
                "interrupted": since and {"ago_s": time.monotonic() - since[0], "why": since[1], "np": since[2]},
                "kept": self._kept,
            }

    def why_over(self, number: int) -> dict[str, Any]:
        """Why the round of that number is over; empty where it is not."""
        with self._changed:
            self._changed.wait_for(lambda: self._rounds.number != number or self._rounds.over is not None, ANSWER_S)
            if self._rounds.number != number:
                return {"over": "lost"}
            return {} if self._rounds.over is None else {"over": self._rounds.over}

    def note(self, scope: str, key: str, value: bytes) -> None:
        """Take in what a worker says."""
        with self._changed:
            if scope == "connected" and (worker := self._rounds.worker(key)) is not None:
                worker.connected = True
            elif scope == "trained":
                said = json.loads(value)
                self._rounds.note(int(key), said.get("recovery"), bool(said.get("committed")))
                if said.get("committed"):
                    self._committed(int(key))
            self._changed.notify_all()

    def _committed(self, number: int) -> None:
        """Ranks have a commit of that round; a program says nothing else of how it recovers."""
        self._reports.send("committed")
        since, rounds = self._rounds.interrupted, self._rounds
        if self._program and since and number == rounds.number:
            rounds.interrupted, seconds = None, time.monotonic() - since[0]
            rounds.said.append(f"training continues with {len(rounds.members)} rank(s), {seconds:.1f} s later")


def create_rendezvous_handler(driver: ElasticDriver) -> type[RendezvousHandler]:
    """The handler of Horovod's rendezvous that answers workers too."""

    class Handler(RendezvousHandler):
        """Requests of Horovod's own store, and those of the module's docstring."""

        def _get_value(self, scope: str, key: str) -> bytes | None:
            if scope == "rank_and_size":
                return driver.numbers(key)
            if scope in ("join", "round"):
                return json.dumps(driver.join(key) if scope == "join" else driver.why_over(int(key))).encode()
            value: bytes | None = super()._get_value(scope, key)
            return value

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope in ("connected", "trained"):
                driver.note(scope, key, value)
            else:
                super()._put_value(scope, key, value)

    return Handler


def main() -> None:
    """Run workers until training is done."""
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    cluster = settings["cluster"]
    places = ClusterPlaces(command) if cluster else Local(settings, command)
    ways = json.loads(os.environ[VARIABLE])["addresses"] if cluster else [places.address]
    server = RendezvousHTTPServer((ways[0] if len(ways) == 1 else "0.0.0.0", 0), RendezvousHandler, False)
    driver = ElasticDriver(server, places, settings["min_np"], settings["max_np"], rename=not cluster)
    server.RequestHandlerClass = create_rendezvous_handler(driver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]

    def work(slot: Slot, events: list[threading.Event]) -> tuple[int, float]:
        environment = horovod_environment(slot, places.address, port, places.interface)
        return places.run(slot.hostname, {"HOROVOD_ELASTIC": "1", **environment}, events), time.time()

    driver.start(settings["np"], work)
    driver.get_results()
    driver.stop()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
