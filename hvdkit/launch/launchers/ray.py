"""The `ray` launcher: an actor of a running Ray cluster starts each rank, in a placement group. No ssh."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hvdkit.errors import RequestError
from hvdkit.launch.hosts import Host, parse_hosts, shown
from hvdkit.launch.job import Job, Tick, prepare
from hvdkit.launch.launchers import tasks
from hvdkit.programs import said

_PROGRAM = str(Path(__file__).with_name("ray_program.py"))
_CONNECT_S, _TIMEOUT_S = 5.0, 90.0


def hosts(option: str | None, np: int) -> list[Host]:
    """The nodes on which Ray places np ranks, or those named; a slot is a GPU or, where no node has one, a CPU.

    Raises RequestError without a cluster, or where it has fewer slots than ranks.
    """
    cluster = _cluster(0 if option else np)
    if option is not None:
        wanted = parse_hosts(option, np)
        if others := [host for host in wanted if host.slots > cluster["slots"].get(host.name, 0)]:
            offered = shown([Host(*node) for node in cluster["slots"].items()])
            raise RequestError(f"-H: {shown(others)}: the Ray cluster offers {offered}")
        return wanted
    if np > cluster["free"]:
        slots = f"{cluster['free'] or 'no'} free slot{'s' if cluster['free'] > 1 else ''}"
        raise RequestError(f"-np {np}: the Ray cluster has {slots}; see `ray status`, or add nodes")
    if cluster["placed"] is None:
        raise RequestError(f"-np {np}: Ray has not placed so many ranks: others use the cluster; see `ray status`")
    return [Host(*node) for node in Counter(cluster["placed"]).items()]


def run(job: Job, on_tick: Tick | None = None) -> None:
    """As `Launcher.run`; every node needs the interpreter, the script and hvdkit under the same paths.

    An elastic job takes what Ray places, now and later.
    """
    prepare(job)
    names = [slot.hostname for slot in job.slots()]
    # A node's name begins with its address (ray_program.py).
    peers = list(dict.fromkeys(name.partition("-")[0] for name in names))

    def command(environment: dict[str, str]) -> list[str]:
        what = ("run", json.dumps(names)) if job.elastic is None else ("places", str(job.elastic.max_np))
        return [sys.executable, _PROGRAM, *what, json.dumps(tasks.passed(job, environment))]

    tasks.run(job, "ray", command, "ray", peers, on_tick)


def _cluster(np: int) -> dict[str, Any]:
    """What there is (`ray_program.describe`). Raises RequestError where there is no Ray, or no cluster."""
    if importlib.util.find_spec("ray") is None:
        raise RequestError(f"--launcher ray: Ray is not installed; run `{sys.executable} -m pip install 'hvdkit[ray]'`")
    _check(os.environ.get("RAY_ADDRESS", ""))
    command = [sys.executable, _PROGRAM, "nodes", str(np)]
    remedy = "see `ray status`; start a cluster with `ray start --head`"
    described: dict[str, Any] = json.loads(said(command, _TIMEOUT_S, "--launcher ray: the Ray cluster", remedy))
    return described


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
