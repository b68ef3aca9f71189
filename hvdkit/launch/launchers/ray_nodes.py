"""A running Ray cluster: its nodes, and actors on them that each run one command.

Nodes go by their IP addresses; a second node with the same address is `ADDRESS-2`. The programs that use this run apart
from hvdkit's own process: Ray starts threads, and changes signals and environment where it is loaded.
"""

from __future__ import annotations

import collections
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node

ANSWER_S = 1.0


class Task:
    """An actor: the parent of one command."""

    def gpus(self) -> list[str]:
        """The GPUs of its node that are this actor's."""
        return [str(number) for number in ray.get_gpu_ids()]

    def run(self, command: list[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
        """Run the command to its end; returns its exit status, and what it said on standard error.

        It gets SIGTERM where its actor ends before it. Ray kills the actor's children then, so the command is the child
        of one that only waits.
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
            cwd=folder if os.path.isdir(folder) else None,  # noqa: PTH112 - actors know what they close over alone
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=step_aside,
        )
        _, said = process.communicate()
        return process.returncode, said.decode("utf-8", "replace").strip()


def connect() -> str | None:
    """Connect to the cluster of RAY_ADDRESS, or the one of this machine; returns why that failed, in one line."""
    # The nodes' Python may know nothing of hvdkit.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        return (" ".join(str(error).split()) or type(error).__name__)[:300]
    return None


def nodes() -> dict[str, dict[str, Any]]:
    """The nodes that are alive, this one first, by name: `id`, `address` and `port`, free `slots` and their `kind`.

    Slots are GPUs where a node of the cluster has some, else CPUs.
    """
    usable: dict[str, dict[str, Any]] = {}
    seen: collections.Counter[str] = collections.Counter()
    alive = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    free, here = available_resources_per_node(), ray.util.get_node_ip_address()
    for node in sorted(
        alive, key=lambda one: (one["NodeManagerAddress"] != here, one["NodeManagerAddress"], one["NodeID"])
    ):
        address = node["NodeManagerAddress"]
        seen[address] += 1
        name = address if seen[address] == 1 else f"{address}-{seen[address]}"
        offers = free.get(node["NodeID"], {})
        slots = int(min(offers.get("CPU", 0), offers.get(kind, 0)))
        where = {"address": address, "port": node["NodeManagerPort"]}
        usable[name] = {"id": node["NodeID"], **where, "slots": slots, "kind": kind}
    return usable


def answers(address: str, port: int) -> bool:
    """Whether a node does: Ray itself may list one that is gone for most of a minute."""
    try:
        socket.create_connection((address, port), ANSWER_S).close()
    except OSError:
        return False
    return True


def bundle(kind: str) -> dict[str, float]:
    """What a rank asks the cluster for, where slots are of this kind."""
    return {"CPU": 1.0, kind: 1.0}


def actor(kind: str, where: Any) -> Any:
    """A new actor for a rank; `where` is Ray's scheduling strategy. It may wait for its place."""
    gpus = bundle(kind).get("GPU", 0)
    return ray.remote(Task).options(num_cpus=1, num_gpus=gpus, scheduling_strategy=where).remote()


def run(task: Any, command: list[str], environment: dict[str, str]) -> Any:
    """Start the command under an actor, in this process's folder; what Ray has of its result (`ended`)."""
    return task.run.remote(command, environment, str(Path.cwd()))


def ended(result: Any) -> tuple[int | None, str]:
    """The exit status of a command that has ended, None where its actor was lost; and what was said, or why."""
    try:
        status, said = ray.get(result)
    except ray.exceptions.RayError as error:
        lines = (line.strip() for line in str(error).splitlines() if "because" in line)
        return None, next(lines, type(error).__name__).partition(". ")[0]
    return status, said
