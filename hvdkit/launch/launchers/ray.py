"""The `ray` launcher: an actor of a running Ray cluster starts each rank, in a placement group. No ssh."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from hvdkit.errors import RequestError
from hvdkit.launch.hosts import Host, parse_hosts, shown
from hvdkit.launch.job import Job, Tick, prepare
from hvdkit.launch.launchers import tasks
from hvdkit.programs import answer

_TASKS, _PLACES = (Path(__file__).with_name(name) for name in ("ray_tasks.py", "ray_places.py"))
_CONNECT_S, _TIMEOUT_S = 5.0, 90.0


def hosts(option: str | None, np: int) -> list[Host]:
    """The nodes of the cluster, with a slot for each free GPU or, where none has GPUs, CPU; with `option` those named.

    Raises RequestError without a cluster, or where it has fewer slots than ranks.
    """
    offered = _nodes()
    if option is not None:
        wanted = parse_hosts(option, np)
        free = {host.name: host.slots for host in offered}
        if others := [host for host in wanted if host.slots > free.get(host.name, 0)]:
            raise RequestError(f"-H: {shown(others)}: the Ray cluster offers {shown(offered) or 'nothing'}")
        return wanted
    slots = sum(host.slots for host in offered)
    if np > slots:
        has = f"{slots} free slots ({shown(offered)})" if offered else "no free slot"
        raise RequestError(f"-np {np}: the Ray cluster has {has}; see `ray status`, or add nodes")
    return offered


def run(job: Job, on_tick: Tick | None = None) -> None:
    """Run the job to its end; `on_tick` is called every 0.1 s.

    Every node needs the interpreter, the script and hvdkit under the paths that they have here. An elastic job follows
    the cluster's list of nodes.

    Raises RequestError (no Ray, no interpreter, an unwritable folder; nothing was started), RankFailure or RunError (a
    rank or Ray failed), Terminated (SIGTERM), KeyboardInterrupt (SIGINT).
    """
    prepare(job)
    names = [slot.hostname for slot in job.slots()]
    # A node's name begins with its address (ray_nodes.py).
    peers = list(dict.fromkeys(name.partition("-")[0] for name in names))

    def command(environment: dict[str, str]) -> list[str]:
        what = [_TASKS, "run", json.dumps(names)] if job.elastic is None else [_PLACES, job.elastic.max_np]
        return [sys.executable, *map(str, what), json.dumps(tasks.passed(job, environment))]

    if job.elastic is None:
        tasks.run(job, command, "ray", peers, {}, on_tick, program="ray")
    else:
        tasks.run_elastic(job, command, "ray", peers, on_tick)


def _nodes() -> list[Host]:
    """The nodes that have free slots, this one first. Raises RequestError where there is no Ray, or no cluster."""
    if importlib.util.find_spec("ray") is None:
        raise RequestError("--launcher ray: Ray is not installed; install it here with `pip install 'hvdkit[ray]'`")
    _check(os.environ.get("RAY_ADDRESS", ""))
    command = [sys.executable, str(_TASKS), "nodes"]
    try:
        # In a process of its own: Ray starts threads, and changes signals and environment where it is loaded.
        done = answer(command, _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"--launcher ray: no answer from the Ray cluster within {_TIMEOUT_S:.0f} s; see `ray status`"
        ) from None
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
        raise RequestError(f"--launcher ray: {said.rstrip('.')}; start a cluster with `ray start --head`")
    nodes = json.loads(done.stdout.strip().rpartition("\n")[2])
    return [Host(name, node["slots"]) for name, node in nodes.items() if node["slots"]]


def _check(address: str) -> None:
    """Check that a cluster's address, if it is one, answers: Ray itself tries for a minute. Raises RequestError."""
    if "://" in address:
        raise RequestError(
            f"RAY_ADDRESS {address}: expected such as 10.0.0.1:6379; start hvdkit on a node of the cluster"
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"RAY_ADDRESS {address}: no Ray cluster answers there ({error}); start one with `ray start --head`"
        ) from None
