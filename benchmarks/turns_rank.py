"""A rank whose recipes take turns: each has its own model in one process and trains a few steps at a time.

    turns_rank.py RECIPE FRAMEWORK PLAN

`in_turns.take_turns` starts it. A turn does what `hvdkit train` does, by the same loop, without logs, evaluation and
checkpoints. The plan, JSON, has `sides`, each a `harness.Side`; `rounds`, each a list of sides; and `out`, which rank 0
writes.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters, paths
from hvdkit.core.group import Group
from hvdkit.core.loop import Loop
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.files import write_atomic
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.usage import Snapshot, load_of_others
from hvdkit.worker.entry import end_as_rank
from hvdkit.worker.setup import RankScript, Setup, start


@dataclass
class Side:
    """A recipe with its model. Each turn begins with `warmup` steps that are not counted; `measured` ones follow."""

    recipe: Recipe
    session: Session
    warmup: int
    measured: int

    def turn(self, setup: Setup, heartbeat: Heartbeat) -> list[float]:
        """Seconds of each step that counts, on this rank; all ranks begin together."""
        synchronize(setup.adapter, setup.mesh.world)
        recipe = self.recipe.model_copy(update={"steps": self.warmup + self.measured})
        loop = Loop(self.session, setup.task, recipe, setup.mesh, setup.dataset, heartbeat.beat)  # without handlers
        loop.train()
        return loop.clock.seconds[self.warmup :]


def opened(
    adapter: Adapter, base: Path, asked: dict[str, tuple[list[str], int, int]], heartbeat: Heartbeat
) -> tuple[Setup, dict[str, Side]]:
    """Start the rank and open the sides. Each has had a short turn, which compiles what is compiled."""
    recipe = schema.load(base)
    setup = start(adapter, RankScript(build_of(adapter.NAME, recipe.model.SCRIPT)), recipe)
    sides: dict[str, Side] = {}
    for name, (keys, warmup, measured) in asked.items():
        heartbeat.beat("building the models")
        recipe = schema.load(base, keys)
        session = setup.session(recipe, setup.strategy(recipe, name))
        session.broadcast_state(setup.mesh.data)
        side = sides[name] = Side(recipe, session, warmup, measured)
        replace(side, measured=0).turn(setup, heartbeat)
    return setup, sides


def synchronize(adapter: Adapter, world: Group) -> None:
    """Wait for the last rank, and leave the cores to it."""
    adapter.to_numpy(adapter.allreduce([adapter.from_numpy(np.zeros(1, np.float32))], world, name="meet")[0])


def build_of(framework: str, script: str = "resnet") -> Any:
    """The model's function of the framework's own recipe."""
    return runpy.run_path(str(paths.script(framework, script)))["build"]


def sent_bytes() -> int:
    """What this host has sent over its link."""
    # Not in /sys, which shows the namespace of whoever has mounted it.
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    name = os.environ["HOROVOD_GLOO_IFACE"] + ":"
    return int(next(line for line in lines if line.strip().startswith(name)).split(":")[1].split()[8])


def take_turns(heartbeat: Heartbeat) -> None:
    """Rank 0 writes `rounds`, lists of turns as (side, steps' seconds of each rank), `sent_bytes` of each turn by host,
    the framework's versions, and `load`, the share of the machine that others took."""
    adapter, plan = adapters.load(sys.argv[2]), json.loads(sys.argv[3])
    setup, sides = opened(adapter, Path(sys.argv[1]), plan["sides"], heartbeat)
    world = setup.mesh.world
    begun, mine = Snapshot.take(time.process_time()), []
    for side in (side for order in plan["rounds"] for side in order):
        synchronize(adapter, world)
        before = sent_bytes()
        seconds = sides[side].turn(setup, heartbeat)
        synchronize(adapter, world)
        mine.append((seconds, sent_bytes() - before))
    report: dict[str, Any] = {"host": os.environ["HOROVOD_HOSTNAME"], "turns": mine}
    report["used"] = Snapshot.take(time.process_time()).since(begun)
    everyone = adapter.allgather_object(report, world, name="turns")
    if setup.mesh.is_root:
        turns = iter(zip(*(rank["turns"] for rank in everyone), strict=True))
        rounds = [[(side, next(turns)) for side in order] for order in plan["rounds"]]
        names = [rank["host"] for rank in everyone]
        found = {
            "versions": adapter.versions(),
            "load": load_of_others([rank["used"] for rank in everyone]),
            "rounds": [[(side, [seconds for seconds, _ in ranks]) for side, ranks in order] for order in rounds],
            # Ranks of a host read the same counter.
            "sent_bytes": [
                [dict(zip(names, (sent for _, sent in ranks), strict=True)) for _, ranks in order] for order in rounds
            ],
        }
        write_atomic(Path(plan["out"]), json.dumps(found) + "\n")
    adapter.shutdown()


if __name__ == "__main__":
    end_as_rank(take_turns)
