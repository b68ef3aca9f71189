"""The program that starts ranks on a Ray cluster, as srun does under Slurm. Only Ray's public API is used.

    python ray_program.py nodes NP                    prints the cluster's slots and where Ray places NP ranks, as JSON
    python ray_program.py run HOSTS NAMES COMMAND…    runs COMMAND once for each entry of HOSTS (a JSON list of nodes)
    python ray_program.py places MOST NAMES COMMAND…  offers places to Horovod's elastic driver (elastic_places.py)

COMMAND runs under an actor of its own, with the variables NAMES (a JSON list) of this process. It gets SIGTERM where
its actor ends before it: the cluster ends actors when this process is gone, or when it loses a node. Slots are GPUs
where a node of the cluster has some, else CPUs. Nodes go by their addresses; a second one there is `ADDRESS-2`.

Exit status 0 where every command ended with 0; else 1, or 2 where there is no such cluster, which standard error says
in one line. It is a process of its own, as Ray starts threads, and changes signals and environment where it is loaded.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# The folder of a script comes first in sys.path: ray.py there would hide Ray.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PLACE_S = 30.0  # for Ray to place what fits into the cluster's free resources
REST_S, LONGEST_REST_S = 10.0, 600.0  # of a place whose worker has failed: doubled with each failure on its node
TICK_S = 0.1
KILLED = 143  # the status of a worker whose actor is gone


class Rank:
    """An actor: the parent of one command."""

    def place(self) -> tuple[str, list[str]]:
        """Its node, and the GPUs there that are its own."""
        return ray.get_runtime_context().get_node_id(), [str(number) for number in ray.get_gpu_ids()]

    def run(self, command: list[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
        """Run the command to its end; returns its exit status, and what it said on standard error.

        Ray kills the children of an actor that ends, so the command is the child of one that only waits.
        """
        import ctypes

        libc, own = ctypes.CDLL(None), os.getpid()

        def end_with(parent: int, number: signal.Signals) -> None:
            libc.prctl(1, int(number), 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)

        def step_aside() -> None:
            end_with(own, signal.SIGKILL)
            between = os.getpid()
            if child := os.fork():
                os.closerange(3, 65536)  # Popen waits for the end of one of these
                _, status = os.waitpid(child, 0)
                os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
            os.setsid()
            end_with(between, signal.SIGTERM)

        process = subprocess.Popen(
            command,
            cwd=folder if Path(folder).is_dir() else None,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=step_aside,
        )
        _, said = process.communicate()
        return process.returncode, said.decode("utf-8", "replace").strip()


def nodes() -> dict[str, dict[str, Any]]:
    """The nodes that are alive, this one first, by name, as `ray.nodes` describes them."""
    here, seen, named = ray.util.get_node_ip_address(), Counter[str](), {}
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeManagerAddress"] != here, node["NodeManagerAddress"], node["NodeID"]))
    for node in alive:
        address = node["NodeManagerAddress"]
        seen[address] += 1
        named[address if seen[address] == 1 else f"{address}-{seen[address]}"] = node
    return named


def bundle() -> dict[str, float]:
    """What a rank asks the cluster for."""
    return {"CPU": 1.0, "GPU": 1.0} if ray.cluster_resources().get("GPU") else {"CPU": 1.0}


def slots(resources: dict[str, float]) -> int:
    """How many ranks these resources are enough for."""
    return int(min(resources.get(kind, 0.0) for kind in bundle()))


def describe(np: int) -> dict[str, Any]:
    """The `slots` of each node, how many are `free` in all, and the nodes on which Ray places np ranks (`placed`)."""
    known, free = nodes(), slots(ray.available_resources())
    placed: list[str] | None = None
    if 0 < np <= free:
        group = placement_group([bundle()] * np, strategy="PACK")
        if group.wait(PLACE_S):
            names = {node["NodeID"]: name for name, node in known.items()}
            chosen = Counter(names[node] for node in placement_group_table(group)["bundles_to_node_id"].values())
            placed = [name for name in known for _ in range(chosen[name])]
        remove_placement_group(group)
    return {"slots": {name: slots(node["Resources"]) for name, node in known.items()}, "free": free, "placed": placed}


def actor(**where: Any) -> Any:
    """A new actor for a rank, which may wait for its place; `where` is for Ray's options."""
    return ray.remote(Rank).options(num_cpus=1, num_gpus=bundle().get("GPU", 0), **where).remote()


def ended(result: Any) -> tuple[int | None, str]:
    """The exit status of a command that has ended, None where its actor was lost; and what was said, or why."""
    try:
        status, said = ray.get(result)
    except ray.exceptions.RayError as error:
        lines = (line.strip() for line in str(error).splitlines() if "because" in line)
        return None, next(lines, type(error).__name__).partition(". ")[0]
    return status, said


def run(hosts: list[str], environment: dict[str, str], command: list[str]) -> int:
    """Run the command once for each of `hosts`, with its number in HVDKIT_TASK; the exit status."""
    known = nodes()
    if lost := [name for name in hosts if name not in known]:
        raise SystemExit(f"{lost[0]}: no node of the Ray cluster any more; see `ray status`")
    selectors = [{"ray.io/node-id": known[name]["NodeID"]} for name in hosts]
    group = placement_group([bundle()] * len(hosts), strategy="PACK", bundle_label_selector=selectors)
    if not group.wait(PLACE_S):
        raise SystemExit(
            f"Ray has not placed {len(hosts)} ranks within {PLACE_S:.0f} s: others use the cluster; see `ray status`"
        )
    actors = [
        actor(scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number))
        for number in range(len(hosts))
    ]
    # A rank takes the GPU of its local number, so all ranks of a node see the GPUs of all of them, in that order.
    gpus: dict[str, list[str]] = {name: [] for name in hosts}
    for name, (_, owned) in zip(hosts, ray.get([one.place.remote() for one in actors]), strict=True):
        gpus[name] += owned
    running = {}
    for number, (name, one) in enumerate(zip(hosts, actors, strict=True)):
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[name])} if gpus[name] else {}
        passed = {**environment, **visible, "HVDKIT_TASK": str(number)}
        running[one.run.remote(command, passed, str(Path.cwd()))] = f"rank {number} on {name}"
    return _wait(running)


def _wait(running: dict[Any, str]) -> int:
    """Wait for all commands; the exit status. Says at last which actors Ray has lost, and why."""
    status, lost = 0, []
    while running:
        (task,), _ = ray.wait(list(running), num_returns=1)
        who = running.pop(task)
        code, said = ended(task)
        if code is None:
            lost.append(f"Ray lost the actor of {who}: {said}")
        elif said:
            print(f"{who}: {said}", flush=True)
        status = 1 if code != 0 else status
    if lost:
        ray.shutdown()  # so that Ray's own words, which are many, come first
        print("\n".join(sorted(lost)), flush=True)
    return status


@dataclass
class RayActor:
    """An actor that Ray has been asked for. It has a `name` once it runs, and is offered then."""

    actor: Any
    awaited: Any  # what Ray has of its node and GPUs, then of its worker's result
    name: str = ""
    node: str = ""
    gpus: str = ""
    state: str = "idle"  # `works` once a worker is started, `done` once that has succeeded


class Pool:
    """Places for workers: as many actors as Ray finds room for, `most` at a time.

    A place is gone as soon as Ray has lost its actor. Where a worker fails, its place rests for a while, longer each
    time, and another one is asked for then. So a node that leaves the cluster and comes again is used again.
    """

    def __init__(self, most: int, environment: dict[str, str], command: list[str], driver: TextIO) -> None:
        self.most, self.environment, self.command, self.driver = most, environment, command, driver
        self.places: list[RayActor] = []
        self.offered: list[str] = []
        self.made = 0
        self.failures: Counter[str] = Counter()  # by node
        self.resting: list[float] = []  # until when

    def serve(self, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        """Follow the cluster and the driver's orders until None comes."""
        while True:
            try:
                order = orders.get(timeout=TICK_S)
                if order is None:
                    return
                self._obey(order)
            except queue.Empty:
                self._look()

    def _obey(self, order: dict[str, Any]) -> None:
        name = order.get("start") or order["end"]
        place = next((place for place in self.places if place.name == name), None)
        if place is None:  # lost meanwhile
            self._say(ended=name, status=KILLED)
        elif "end" in order:
            ray.kill(place.actor)
        else:
            gpus = {"CUDA_VISIBLE_DEVICES": place.gpus} if place.gpus else {}
            environment = {**self.environment, **order["environment"], **gpus}
            place.awaited, place.state = place.actor.run.remote(self.command, environment, str(Path.cwd())), "works"

    def _look(self) -> None:
        """Take in which actors run, and how workers have ended; ask for actors as long as training lasts."""
        awaited = {place.awaited: place for place in self.places if place.state != "done"}
        for result in ray.wait(list(awaited), num_returns=len(awaited), timeout=0)[0] if awaited else ():
            place = awaited[result]
            self._end(place) if place.state == "works" else self._find(place)
        self.resting = [until for until in self.resting if until > time.monotonic()]
        if not any(place.state == "done" for place in self.places):
            for _ in range(self.most - len(self.places) - len(self.resting)):
                new = actor()
                self.places.append(RayActor(new, new.place.remote()))
        self._offer()

    def _find(self, place: RayActor) -> None:
        """It runs; it is asked again, so that the loss of an idle one is noticed."""
        try:
            place.node, gpus = ray.get(place.awaited)
        except ray.exceptions.RayError:
            self.places.remove(place)
            return
        if not place.name:
            self.made += 1
            names = {node["NodeID"]: name for name, node in nodes().items()}
            place.name, place.gpus = f"{names.get(place.node, place.node)}_{self.made}", ",".join(gpus)
        place.awaited = place.actor.place.remote()

    def _end(self, place: RayActor) -> None:
        status, said = ended(place.awaited)
        if status == 0:
            place.state = "done"
        else:
            lost = "Ray lost its actor: " if status is None else ""
            print(f"worker at {place.name}: {lost}{said or f'status {status}'}", file=sys.stderr, flush=True)
            ray.kill(place.actor)
            self.places.remove(place)
            self.resting.append(time.monotonic() + min(REST_S * 2 ** self.failures[place.node], LONGEST_REST_S))
            self.failures[place.node] += 1
            self._offer()
        self._say(ended=place.name, status=KILLED if status is None else status)

    def _offer(self) -> None:
        """Say which places there are, if that has changed."""
        names = [place.name for place in self.places if place.name]
        if names != self.offered:
            self.offered = names
            self._say(places=names)

    def _say(self, **what: object) -> None:
        print(json.dumps(what), file=self.driver, flush=True)


def orders_of_driver() -> queue.SimpleQueue[dict[str, Any] | None]:
    """What comes on standard input, line by line; None at its end."""
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)

    threading.Thread(target=listen, daemon=True).start()
    return orders


def main() -> int:
    """The command line of the module's docstring."""
    what, argument, *more = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints is no answer
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        print((" ".join(str(error).split()) or type(error).__name__)[:300], file=sys.stderr)
        return 2
    if what == "nodes":
        print(json.dumps(describe(int(argument))), file=answers, flush=True)
        return 0
    names, *command = more
    passed = {name: os.environ[name] for name in json.loads(names) if name in os.environ}
    if what == "run":
        return run(json.loads(argument), passed, command)
    Pool(int(argument), passed, command, answers).serve(orders_of_driver())
    return 0


if __name__ == "__main__":
    sys.exit(main())
