"""What ranks share that take turns: several recipes in one process, each with its own network, a few steps at a time.

What a turn does is what `hvdkit train` does, by the same loop, but that nothing is logged, evaluated or kept. A file
says what: `recipe`, a path, and `keys`, laid over it; `sides`, each with `keys` of its own and how many steps of a turn
are left out (`warmup`) and counted (`measured`); `rounds`, each a list of sides; and `out`, what rank 0 is to write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import paths
from hvdkit.core import metrics
from hvdkit.core.heartbeat import Heartbeat
from hvdkit.core.seam import Adapter, Session
from hvdkit.core.topology import Topology
from hvdkit.core.trainer import Loop
from hvdkit.data.batches import Dataset
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.strategies.averaging import Communication
from hvdkit.worker.train import open_session, start


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

    def turn(self, adapter: Adapter, topology: Topology, dataset: Dataset, heartbeat: Heartbeat) -> list[float]:
        """Seconds of each step that counts, on this rank; all ranks begin together."""
        meet(adapter)
        loop = Turn(
            adapter,
            self.session,
            self.recipe.model_copy(update={"steps": self.warmup + self.measured, "log_every": 0}),
            topology,
            dataset,
            metrics.MetricsFile(None),
            tell=heartbeat.beat,
            strategy=self.communication,
        )
        adapter.fit(self.session, loop)
        return loop.clock.seconds[self.warmup :]


def opened(adapter: Adapter, plan: dict[str, Any], heartbeat: Heartbeat) -> tuple[Topology, Dataset, dict[str, Side]]:
    """Start the rank and open the plan's sides. Each has had a short turn, which compiles what is compiled."""
    where, keys = Path(plan["recipe"]), plan["keys"]
    build = recipe_of(adapter.NAME).build
    topology, dataset, network = start(adapter, schema.load(where, keys))
    sides: dict[str, Side] = {}
    for name, asked in plan["sides"].items():
        heartbeat.beat("building the networks")
        recipe = schema.load(where, [*keys, *asked["keys"]])
        communication = Communication(adapter, topology, recipe)
        session = open_session(adapter, build, network, recipe, communication)
        adapter.broadcast_state(session)
        side = sides[name] = Side(recipe, communication, session, asked["warmup"], asked["measured"])
        replace(side, measured=0).turn(adapter, topology, dataset, heartbeat)
    return topology, dataset, sides


def meet(adapter: Adapter) -> None:
    """Wait for the last rank, and leave the cores to it."""
    adapter.to_numpy(adapter.allreduce([adapter.from_numpy(np.zeros(1, np.float32))], name="meet")[0])


def recipe_of(framework: str) -> Any:
    """The module of the framework's own recipe."""
    spec = spec_from_file_location("resnet", paths.script(framework))
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
