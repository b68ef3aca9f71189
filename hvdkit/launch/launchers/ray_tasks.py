"""The program that starts ranks on a Ray cluster, as srun does under Slurm. It runs apart from hvdkit's own process.

    python ray_tasks.py nodes                       prints the cluster's nodes as JSON
    python ray_tasks.py run HOSTS NAMES COMMAND…    runs COMMAND once for each entry of HOSTS (a JSON list of nodes)

Nodes go by their IP addresses; a second node with the same address is `ADDRESS-2`. COMMAND runs under an actor of its
own, in a placement group with a bundle on each of HOSTS, with the variables NAMES (a JSON list) of this process and
its number in HVDKIT_TASK. It gets SIGTERM where its actor ends before it: the cluster ends actors when this process is
gone, or when it loses a node.

The cluster is that of RAY_ADDRESS, or the one of this machine. Exit status 0 where every command ended with 0; else 1,
or 2 where there is no such cluster, which standard error says in one line.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

# The folder of a script comes first in sys.path: ray.py there would hide Ray.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PLACE_S = 30.0  # for the cluster to free what was counted as free


class Task:
    """An actor: the parent of one command."""

    def gpus(self) -> list[str]:
        """The GPUs of its node that are this actor's."""
        return [str(each) for each in ray.get_gpu_ids()]

    def run(self, command: list[str], environment: dict[str, str], folder: str) -> int:
        """Run the command to its end; returns its exit status."""

        def end_with_actor() -> None:
            import ctypes

            ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG

        return subprocess.Popen(
            command,
            cwd=folder if os.path.isdir(folder) else None,  # noqa: PTH112 - actors know what they close over alone
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_actor,
        ).wait()


def nodes() -> dict[str, dict[str, Any]]:
    """The nodes that are alive, this one first, by name: `id`, free `slots`, and of which `kind` these are.

    Slots are GPUs where a node of the cluster has some, else CPUs.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: collections.Counter[str] = collections.Counter()
    alive = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    free, here = available_resources_per_node(), ray.util.get_node_ip_address()
    for node in sorted(
        alive, key=lambda each: (each["NodeManagerAddress"] != here, each["NodeManagerAddress"], each["NodeID"])
    ):
        address = node["NodeManagerAddress"]
        seen[address] += 1
        name = address if seen[address] == 1 else f"{address}-{seen[address]}"
        offers = free.get(node["NodeID"], {})
        slots = int(min(offers.get("CPU", 0), offers.get(kind, 0)))
        found[name] = {"id": node["NodeID"], "slots": slots, "kind": kind}
    return found


def run(hosts: list[str], names: list[str], command: list[str]) -> int:
    """Run the command once for each of `hosts`; the exit status."""
    known = nodes()
    if lost := [name for name in hosts if name not in known]:
        raise SystemExit(f"{lost[0]}: no node of the Ray cluster any more; see `ray status`")
    bundles = [{"CPU": 1.0, known[name]["kind"]: 1.0} for name in hosts]
    group = placement_group(
        bundles, strategy="PACK", bundle_label_selector=[{"ray.io/node-id": known[name]["id"]} for name in hosts]
    )
    if not group.wait(PLACE_S):
        raise SystemExit(
            f"Ray has not placed {len(hosts)} ranks within {PLACE_S:.0f} s: others use the cluster; see `ray status`"
        )
    actor = ray.remote(Task)
    tasks = [
        actor.options(
            num_cpus=1,
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        ).remote()
        for place, bundle in enumerate(bundles)
    ]
    passed = {name: os.environ[name] for name in names if name in os.environ}
    running = {}
    for place, (task, gpus) in enumerate(zip(tasks, _gpus(hosts, tasks), strict=True)):
        environment = {**passed, **gpus, "HVDKIT_TASK": str(place)}
        running[task.run.remote(command, environment, str(Path.cwd()))] = place
    return _wait(running, hosts)


def _gpus(hosts: list[str], tasks: list[Any]) -> list[dict[str, str]]:
    """A rank takes the GPU of its local number, so all ranks of a node see the GPUs of all of them, in that order."""
    owned = ray.get([task.gpus.remote() for task in tasks])
    return [
        {
            "CUDA_VISIBLE_DEVICES": ",".join(
                each for other, ids in zip(hosts, owned, strict=True) if other == host for each in ids
            )
        }
        if mine
        else {}
        for host, mine in zip(hosts, owned, strict=True)
    ]


def _wait(running: dict[Any, int], hosts: list[str]) -> int:
    """Wait for all commands; the exit status. Says at last which actors Ray has lost, and why."""
    status, lost = 0, []
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        for each in done:
            place = running.pop(each)
            try:
                status = 1 if ray.get(each) != 0 else status
            except ray.exceptions.RayError as error:
                said = next(
                    (line.strip() for line in str(error).splitlines() if "because" in line), type(error).__name__
                )
                lost.append(f"Ray lost the actor of rank {place} on {hosts[place]}: {said.partition('. ')[0]}")
    if lost:
        ray.shutdown()  # so that Ray's own words, which are many, come first
        print("\n".join(sorted(lost)), flush=True)
    return 1 if lost else status


def main() -> int:
    """The command line of the module's docstring."""
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        print(said[:300], file=sys.stderr)
        return 2
    if sys.argv[1] == "nodes":
        print(json.dumps(nodes()))
        return 0
    return run(json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
