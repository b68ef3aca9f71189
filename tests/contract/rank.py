"""One rank of the contract suite: `python tests/contract/rank.py FRAMEWORK REPORT.json`. Rank 0 writes the report.

`FRAMEWORK-groups` runs it on four ranks as two data axes of two at once, which have other batches. In `mxnet-leaking`
collectives are over all four, whatever their group: what results do to others must be seen.

The report maps each case and each capability to the ranks' faults (none: it holds). Beside it, in an .npz file, lies
what one step made of known weights and images, to be compared between frameworks.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core.group import Mesh, sets
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.session import Session
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Loss, Optimizer, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.tasks import resnet
from tests.contract import (
    cases,
    everything,  # noqa: F401 - adds their cases
)
from tests.contract.cases import BETWEEN, CASES, CLASSES, LEAKS, PROBED, Place, batch, fresh, probe
from tests.contract.tiny import tiny_network, tiny_state

ROOT = Path(__file__).resolve().parents[2]


def table(precision: str = "fp32", recompute: bool = False) -> resnet.ResNet:
    """ResNet-8: the first block of each of resnet20's stages. All kinds of layer are in it, and it is soon compiled."""
    whole, dtypes = resnet.architecture("resnet20", CLASSES), PRECISIONS[precision]
    return replace(
        whole,
        blocks=tuple(block for block in whole.blocks if block.name.endswith(".0")),
        dtype=dtypes.parameters,
        compute_dtype=dtypes.compute,
        recompute=recompute,
    )


def model(framework: str, table: resnet.ResNet) -> Any:
    """The recipe script's own code, building the table."""
    return runpy.run_path(str(ROOT / "recipes" / framework / "resnet.py"))["build"](table)


def main(framework: str, report: Path) -> None:
    framework, _, variant = framework.partition("-")
    adapter: Any = adapters.load(framework)
    if variant == "overlapped":  # as on a GPU: gradients are sent while backward goes on
        from hvdkit.adapters.pytorch import training

        training.OVERLAPPED_ON = {"cpu"}
    parts = 2 if variant in ("groups", "leaking") else 1
    world = adapter.init("cpu", sets=sets(int(os.environ["HOROVOD_SIZE"]), tensor_size=parts))
    mesh = Mesh(world, tensor_size=parts, process_set=adapter.process_set)
    topology = Place(mesh.data.index, mesh.data.size, mesh.data.index, mesh.data.size, device=world.device, mesh=mesh)
    cases.seeds_from = 10_000 * mesh.tensor.index
    if variant == "leaking":
        adapter.how = lambda group: {"process_set": adapter.horovod.global_process_set}

    # By their settings, those that no case has at the moment, with the state in which they began: a framework that
    # compiles does it once for all cases. A case gets each once.
    idle: defaultdict[tuple[Any, ...], list[tuple[Session, dict[str, np.ndarray]]]] = defaultdict(list)
    taken: list[tuple[tuple[Any, ...], Session, dict[str, np.ndarray]]] = []

    def make(
        compression: str = "none",
        label_smoothing: float = 0.0,
        precision: str = "fp32",
        recompute: bool = False,
        tiny: bool = False,
        optimizer: Optimizer | None = None,
        strategy: Strategy | None = None,
        **settings: Any,
    ) -> Any:
        optimizer = optimizer or Sgd(**({"learning_rate": 0.1} | settings))
        key = (compression, label_smoothing, precision, recompute, tiny, optimizer.model_dump_json())
        if strategy is None and idle[key]:
            session, start = idle[key].pop()
            session.load_state(start)
            session.set_learning_rate(optimizer.learning_rate)
            taken.append((key, session, start))
            return session
        if tiny:
            built, state = tiny_network(framework, PRECISIONS[precision].parameters), tiny_state()
        else:
            built, state = model(framework, table(precision, recompute)), table().initial_state(seed=3)
        dense = strategy or Dense(adapter, mesh.data, half=compression == "fp16", name=fresh())
        session = Session(adapter, built, optimizer, Loss(label_smoothing=label_smoothing), dense, precision)
        session.load_state(state)
        if strategy is None:
            taken.append((key, session, session.state()))
        return session

    outcome = {}
    chosen = {"leaking": LEAKS, "groups": BETWEEN if framework in ("tensorflow", "keras") else CASES}.get(
        variant, CASES
    )
    for name in chosen:
        case = CASES[name]
        fault = None
        try:
            case(adapter, topology, make)
        except Exception:
            fault = traceback.format_exc()
        everyone = adapter.allgather_object(fault, mesh.world, name=f"outcome.{name}")
        outcome[name] = [fault for fault in everyone if fault]
        if not outcome[name]:
            for key, session, start in taken:
                idle[key].append((session, start))
        taken.clear()

    # one by one, each told by all ranks, as one rank alone may lack it
    probes = {name: probe(name, adapter, topology) for name in PROBED}
    everyone = adapter.allgather_object(probes, mesh.world, name="probes")
    capabilities = {name: [fault for probes in everyone if (fault := probes[name])] for name in PROBED}

    session = make()
    session.train_step([batch(topology.rank)])
    adapter.allgather_object(None, mesh.world, name="ended")  # who leaves ends Horovod for all
    made = session.state() | {"logits": session.predict(batch(9).inputs)}
    if mesh.is_root:
        np.savez(report.with_suffix(".npz"), **made)
        told = {"declared": sorted(adapter.CAPABILITIES), "cases": outcome, "capabilities": capabilities}
        report.write_text(json.dumps(told))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
