"""The program that starts ranks on a Ray cluster, as srun does under Slurm.

    python ray_tasks.py nodes                       prints the cluster's nodes as JSON
    python ray_tasks.py run HOSTS NAMES COMMAND…    runs COMMAND once for each entry of HOSTS (a JSON list of nodes)

COMMAND runs under an actor of its own, in a placement group with a bundle on each of HOSTS, with the variables NAMES (a
JSON list) of this process and its number in HVDKIT_TASK. It gets SIGTERM where its actor ends before it: the cluster
ends actors when this process is gone, or when it loses a node.

Exit status 0 where every command ended with 0; else 1, or 2 where there is no such cluster, which standard error says
in one line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# The folder of a script comes first in sys.path: ray.py there would hide Ray.
del sys.path[0]
# ruff: noqa: E402 - what is imported below must not be found there

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hvdkit.launch.launchers import ray_nodes

PLACE_S = 30.0  # for the cluster to free what was counted as free


def run(hosts: list[str], names: list[str], command: list[str]) -> int:
    """Run the command once for each of `hosts`; the exit status."""
    known = ray_nodes.nodes()
    if lost := [name for name in hosts if name not in known]:
        raise SystemExit(f"{lost[0]}: no node of the Ray cluster any more; see `ray status`")
    kinds = [known[name]["kind"] for name in hosts]
    group = placement_group(
        [ray_nodes.bundle(kind) for kind in kinds],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": known[name]["id"]} for name in hosts],
    )
    if not group.wait(PLACE_S):
        raise SystemExit(
            f"Ray has not placed {len(hosts)} ranks within {PLACE_S:.0f} s: others use the cluster; see `ray status`"
        )
    tasks = [
        ray_nodes.actor(kind, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place))
        for place, kind in enumerate(kinds)
    ]
    passed = {name: os.environ[name] for name in names if name in os.environ}
    running = {}
    for place, (task, gpus) in enumerate(zip(tasks, _gpus(hosts, tasks), strict=True)):
        running[ray_nodes.run(task, command, {**passed, **gpus, "HVDKIT_TASK": str(place)})] = place
    return _wait(running, hosts)


def _gpus(hosts: list[str], tasks: list[Any]) -> list[dict[str, str]]:
    """A rank takes the GPU of its local number, so all ranks of a node see the GPUs of all of them, in that order."""
    owned = ray.get([task.gpus.remote() for task in tasks])
    return [
        {
            "CUDA_VISIBLE_DEVICES": ",".join(
                id for other, ids in zip(hosts, owned, strict=True) if other == host for id in ids
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
        for task in done:
            place = running.pop(task)
            code, said = ray_nodes.ended(task)
            who = f"rank {place} on {hosts[place]}"
            if code is None:
                lost.append(f"Ray lost the actor of {who}: {said}")
            elif said:
                print(f"{who}: {said}", flush=True)
            status = 1 if code != 0 else status
    if lost:
        ray.shutdown()  # so that Ray's own words, which are many, come first
        print("\n".join(sorted(lost)), flush=True)
    return status


def main() -> int:
    """The command line of the module's docstring."""
    if fault := ray_nodes.connect():
        print(fault, file=sys.stderr)
        return 2
    if sys.argv[1] == "nodes":
        print(json.dumps(ray_nodes.nodes()))
        return 0
    return run(json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
