"""The program that offers places for workers on a Ray cluster to Horovod's elastic driver (elastic_places.py).

usage: python ray_places.py MOST NAMES COMMAND…

A place is an actor that Ray has placed: on each node as many as it has free slots, MOST in all. It is offered once it
runs, and gone as soon as Ray has lost it, or its node does not answer. COMMAND is started in a place at the driver's
order, with the variables NAMES (a JSON list) of this process. Where it fails, its slot rests for a while, longer each
time, and is offered as a new place then: to Horovod's driver a place that has failed stays bad for ever. So a node that
leaves the cluster and comes again is used again.

Ends when its standard input does. Exit status 2 where there is no such cluster, which standard error says in one line.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, TextIO

# The folder of a script comes first in sys.path: ray.py there would hide Ray.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hvdkit.launch.launchers import ray_nodes

PLACE_S = 120.0  # for Ray to start an actor where a slot was free; busy machines need a minute
TOGETHER_S = 10.0  # for those that are asked for at once
LOOK_S = 1.0  # between looks at the list of nodes
REST_S, LONGEST_REST_S = 10.0, 600.0  # of a slot whose worker has failed: doubled with each failure on its node
_TICK_S = 0.1
MISSES = 2  # looks at which a node does not answer, before it is taken for lost
_KILLED = 143  # the status of a worker whose actor is gone


@dataclass
class RankActor:
    """An actor on a node. `gpus` is None until it runs; `worker` is what Ray has of its command's result."""

    name: str
    node: str
    actor: Any
    answer: Any  # what Ray has of its GPUs
    asked_at: float
    gpus: list[str] | None = None
    worker: Any = None
    done: bool = False  # its worker has succeeded


class Pool:
    """The places, `most` at a time. `environment` and `command` are each worker's; what it says goes to `driver`."""

    def __init__(self, most: int, environment: dict[str, str], command: list[str], driver: TextIO) -> None:
        self.most, self.environment, self.command, self.driver = most, environment, command, driver
        self.places: dict[str, RankActor] = {}
        self.offered: list[str] | None = None
        self.made = 0
        self.failures: Counter[str] = Counter()  # by node
        self.misses: Counter[str] = Counter()  # by node, since it has answered
        self.nodes: dict[str, dict[str, Any]] = {}  # that Ray lists, by their ids
        self.resting: list[tuple[str, float]] = []  # slots by their node, and until when
        self.look_at = 0.0

    def serve(self, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        """Follow the cluster and the driver's orders until None comes."""
        while True:
            try:
                order = orders.get(timeout=_TICK_S)
                if order is None:
                    return
                self._obey(order)
            except queue.Empty:
                pass
            self._look_at_actors()
            if time.monotonic() >= self.look_at:
                self._look_at_nodes()
                self.look_at = time.monotonic() + LOOK_S
            self._offer()

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            place = self.places.get(order["start"])
            if place is None or place.gpus is None:  # lost meanwhile
                self._say(ended=order["start"], status=_KILLED)
                return
            gpus = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if place.gpus else {}
            environment = {**self.environment, **order["environment"], **gpus}
            place.worker = ray_nodes.run(place.actor, self.command, environment)
        elif order["end"] in self.places:
            ray.kill(self.places[order["end"]].actor)

    def _look_at_actors(self) -> None:
        """Take in which actors run, and how workers have ended."""
        awaited = [
            place.worker or place.answer
            for place in self.places.values()
            if not place.done and (place.worker is not None or place.gpus is None)
        ]
        done = set(ray.wait(awaited, num_returns=len(awaited), timeout=0)[0]) if awaited else set()
        for place in list(self.places.values()):
            if place.name not in self.places:  # gone with its node, as another one has shown
                continue
            if place.worker in done:
                self._end(place)
            elif place.answer in done:
                try:
                    place.gpus = ray.get(place.answer)
                except ray.exceptions.RayError:  # its node is gone
                    self._forget(place)
            elif place.gpus is None and time.monotonic() > place.asked_at + PLACE_S:  # others were faster
                self._forget(place)

    def _end(self, place: RankActor) -> None:
        status, said = ray_nodes.ended(place.worker)
        place.done = status == 0
        if status is None and not self._answers(place.node):
            self._lose(place.node)
            return
        if not place.done:
            lost = "Ray lost its actor: " if status is None else ""
            print(f"worker at {place.name}: {lost}{said or f'status {status}'}", file=sys.stderr, flush=True)
            self._forget(place)
            self._rest(place.node)
            self._offer()
        self._say(ended=place.name, status=_KILLED if status is None else status)

    def _answers(self, node: str) -> bool:
        return node in self.nodes and ray_nodes.answers(self.nodes[node]["address"], self.nodes[node]["port"])

    def _lose(self, node: str) -> None:
        """The node is gone with all its places, though its actors may live for a moment yet."""
        gone = [place for place in self.places.values() if place.node == node and not place.done]
        for place in gone:
            print(f"worker at {place.name}: its node is gone", file=sys.stderr, flush=True)
            self._forget(place)
        self._offer()
        for place in gone:
            if place.worker is not None:
                self._say(ended=place.name, status=_KILLED)

    def _forget(self, place: RankActor) -> None:
        ray.kill(place.actor)
        del self.places[place.name]

    def _rest(self, node: str) -> None:
        seconds = min(REST_S * 2 ** self.failures[node], LONGEST_REST_S)
        self.failures[node] += 1
        self.resting.append((node, time.monotonic() + seconds))

    def _look_at_nodes(self) -> None:
        """Drop the places of nodes that are gone, and have an actor for each slot that is free."""
        self.nodes = {node["id"]: {"name": name, **node} for name, node in ray_nodes.nodes().items()}
        for number in {place.node for place in self.places.values()}:
            self.misses[number] = 0 if self._answers(number) else self.misses[number] + 1
            if number not in self.nodes or self.misses[number] >= MISSES:
                self._lose(number)
        now = time.monotonic()
        self.resting = [(node, until) for node, until in self.resting if until > now]
        if any(place.done for place in self.places.values()):  # training is over
            return
        for number, node in self.nodes.items():
            if self.misses[number]:
                continue
            waiting = sum(place.gpus is None for place in self.places.values() if place.node == number)
            rest = sum(resting == number for resting, _ in self.resting)
            for _ in range(min(node["slots"] - waiting - rest, self.most - len(self.places))):
                self.made += 1
                actor = ray_nodes.actor(node["kind"], NodeAffinitySchedulingStrategy(number, soft=False))
                new = RankActor(f"{node['name']}_{self.made}", number, actor, actor.gpus.remote(), now)
                self.places[new.name] = new

    def _offer(self) -> None:
        """Say which places there are, if that has changed. New ones wait for each other: each change stops training."""
        now, before = time.monotonic(), self.offered or []
        wait = any(place.gpus is None and now < place.asked_at + TOGETHER_S for place in self.places.values())
        ready = [place.name for place in self.places.values() if place.gpus is not None]
        offered = [name for name in ready if name in before or not wait]
        if offered != self.offered:
            self.offered = offered
            self._say(places=offered)

    def _say(self, **what: object) -> None:
        print(json.dumps(what), file=self.driver, flush=True)


def main() -> int:
    """The command line of the module's docstring."""
    driver = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints is no message to the driver
    if fault := ray_nodes.connect():
        print(fault, file=sys.stderr)
        return 2
    most, names, *command = sys.argv[1:]
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)

    threading.Thread(target=listen, daemon=True).start()
    passed = {name: os.environ[name] for name in json.loads(names) if name in os.environ}
    Pool(int(most), passed, command, driver).serve(orders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
