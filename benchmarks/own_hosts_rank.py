"""A rank of `own_hosts.py`: several recipes that take turns of a few steps in one process, each with its own network.

    python own_hosts_rank.py PLAN.json FRAMEWORK

What a turn does is what `hvdkit train` does, by the same loop, but that nothing is logged, evaluated or kept.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters, config, paths
from hvdkit.config import Recipe
from hvdkit.core import metrics
from hvdkit.core.adapter import Adapter, Session
from hvdkit.core.communication import Communication
from hvdkit.core.data import Dataset
from hvdkit.core.lifeline import Lifeline
from hvdkit.core.loop import Loop
from hvdkit.core.main import end_as_rank
from hvdkit.core.run import open_session, start
from hvdkit.core.topology import Topology
from hvdkit.core.usage import Snapshot, load_of_others
from hvdkit.files import write_atomic


class Turn(Loop):
    """Steps of one epoch, and nothing else."""

    def end_epoch(self) -> None:
        """Nobody asks how good it is."""


@dataclass
class Side:
    """A recipe with its network. Each turn begins with `warmup` steps that are not counted; `measured` ones follow."""

    recipe: Recipe
    communication: Communication
    session: Session
    warmup: int
    measured: int

    def turn(self, adapter: Adapter, topology: Topology, dataset: Dataset, lifeline: Lifeline) -> list[float]:
        """Seconds of each step that counts, on this rank; all ranks begin together."""
        adapter.to_numpy(adapter.allreduce([adapter.from_numpy(np.zeros(1, np.float32))], name="turn")[0])
        loop = Turn(
            adapter,
            self.session,
            self.recipe.model_copy(update={"steps": self.warmup + self.measured, "log_every": 0}),
            topology,
            dataset,
            metrics.MetricsFile(None),
            tell=lifeline.beat,
            communication=self.communication,
        )
        adapter.fit(self.session, loop)
        return loop.clock.seconds[self.warmup :]


def take_turns(lifeline: Lifeline) -> None:
    """Rank 0 writes, by round and side, the steps of all ranks, and what share of the machine others took."""
    plan, adapter = json.loads(Path(sys.argv[1]).read_text()), adapters.load(sys.argv[2])
    build = _recipe_of(sys.argv[2]).build
    topology, dataset, network = start(adapter, config.load(Path(plan["recipe"]), plan["keys"]))
    sides: dict[str, Side] = {}
    for label, asked in plan["sides"].items():
        lifeline.beat("building the networks")
        recipe = config.load(Path(plan["recipe"]), [*plan["keys"], *asked["keys"]])
        communication = Communication(adapter, topology, recipe)
        session = open_session(adapter, build, network, recipe, communication)
        adapter.broadcast_state(session)
        side = sides[label] = Side(recipe, communication, session, asked["warmup"], asked["measured"])
        replace(side, measured=0).turn(adapter, topology, dataset, lifeline)  # compiles what is compiled
    begun, rounds = Snapshot.take(time.process_time()), []
    for order in plan["rounds"]:
        rounds.append({label: sides[label].turn(adapter, topology, dataset, lifeline) for label in order})
    mine = {"rounds": rounds, "used": Snapshot.take(time.process_time()).since(begun)}
    everyone = adapter.allgather_object(mine, name="turns")
    if topology.is_root:
        found = {
            "versions": adapter.versions(),
            "load": load_of_others([rank["used"] for rank in everyone]),
            "rounds": [
                {label: [rank["rounds"][number][label] for rank in everyone] for label in order}
                for number, order in enumerate(plan["rounds"])
            ],
        }
        write_atomic(Path(plan["out"]), json.dumps(found) + "\n")
    adapter.shutdown()


def _recipe_of(framework: str) -> Any:
    spec = spec_from_file_location("resnet", paths.script(framework))
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    end_as_rank(take_turns)
