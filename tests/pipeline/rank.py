"""One rank of four that trains a GPT in stages, beside the whole model on the batches of all ranks:

    python tests/pipeline/rank.py FRAMEWORK REPORT.json CASE…

A case is a schedule with a number of stages or `in parts`, `few` steps of what is compiled soon, shares of the
optimizer's state, `counted`, `planted`, `overflow`, `dropout`, or `drifted`; for eight ranks `THREE_AXES`.
Before each of the `forced` steps both load one state. Each fault that is planted is to be seen in the gradients, or in
the weights after a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core.group import Mesh, sets
from hvdkit.core.session import Session
from hvdkit.core.state import digest
from hvdkit.errors import RunError
from hvdkit.handlers.rank_checks import check_ranks
from hvdkit.recipe.schema import Loss, Sgd
from tests.pipeline.dropping import dropped_out, masked
from tests.pipeline.pair import ADAMW, OTHERS, RANKS, STEPS, Pair, batch
from tests.pipeline.planted import planted, shares_with_faults
from tests.tensor.rank import far, most

THREE_AXES = "two by two by two"  # on eight ranks


def trained(framework: str, mesh: Mesh, schedule: str, few: bool = False, shards: bool = False) -> dict[str, Any]:
    """Errors of each of the forced steps, of others without a teacher unless there are `few`, and of evaluations; and
    whether state is read and loaded whole. With `shards` of the optimizer's state, and an average of the weights."""
    pair = Pair(framework, mesh, schedule, more=0 if few else 1, shards=shards)
    loaded = pair.stages.state()
    gradients, weights, free = [], [], []
    for number in range(STEPS):
        pair.stages.load_state(pair.whole.state())
        gradients.append(pair.step(number))
        weights.append(pair.after())
    recompute, others = "recompute" in adapters.load(framework).CAPABILITIES, OTHERS if framework == "pytorch" else []
    for optimizer in () if few else (ADAMW, *others):
        other = Pair(framework, mesh, schedule, optimizer, recompute=recompute, shards=shards)
        for number in range(4):
            other.step(number, 1 + number % 2)
        free.append(other.after())
    pair.stages.load_state(pair.whole.state())
    seen, evaluated = batch(99, mesh.data.index), evaluated_by(pair.stages)
    averaged = 0.0
    if shards:
        with pair.stages.averaged(), pair.whole.averaged():
            averaged = far(pair.stages.losses(seen), pair.whole.losses(seen))
    own = pair.stages.trainable.parameters
    return {
        "gradients": most(gradients),
        "weights": most(weights),
        "free": most([{name: error for name, error in each.items() if name in pair.whole.shapes} for each in free]),
        "evaluation": max(averaged, far(pair.stages.losses(seen), pair.whole.losses(seen))),
        "evaluated": sorted(evaluated),
        "loaded": all(np.array_equal(loaded[name], pair.start[name]) for name in pair.start),
        "names": sorted(own),
        "digest": [digest(session.model_arrays()) for session in (pair.stages, pair.whole)],
        "bytes": [session.state_bytes() for session in (pair.stages, pair.whole)],
        "sent": pair.stages.bytes_per_step,
    }


def evaluated_by(session: Session) -> set[int]:
    """How many samples its chunks take at once in evaluations from now on."""
    sizes: set[int] = set()

    def noted(evaluate: Callable[..., Any], inputs: Any, targets: Any) -> Any:
        sizes.add(len(inputs))
        return evaluate(inputs, targets)

    for stage in session.pipeline._chunks if session.pipeline else ():
        stage.evaluate = partial(noted, stage.evaluate)  # type: ignore[method-assign]
    return sizes


def counted(framework: str, mesh: Mesh) -> dict[str, float]:
    """Errors of steps with a loss that is a sum over a count, which is another one in each microbatch."""
    found = []
    for schedule in ("gpipe", "1f1b"):
        pair = Pair(framework, mesh, schedule, loss=Loss(ignored_label=3, class_weights=list(range(1, 38))))
        found += [pair.step(number, 1 + number % 2) | pair.after() for number in range(3)]
    return most(found)


def on_three_axes(framework: str, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of gradients and state in forced steps, and of the weights after as many without a teacher."""
    pair, forced = Pair(framework, mesh, "1f1b"), []
    for number in range(STEPS):
        pair.stages.load_state(pair.whole.state())
        forced.append(pair.step(number) | {f"after {name}": error for name, error in pair.after().items()})
    for session in (pair.stages, pair.whole):
        session.load_state(pair.start)
    for number in range(STEPS):
        pair.step(number)
    return {
        "forced": most(forced),
        "free": {name: error for name, error in pair.after().items() if name in pair.whole.shapes},
    }


def overflowed(framework: str, mesh: Mesh) -> list[str]:
    """What an infinite gradient on the last stage alone changes."""
    session = Pair(framework, mesh, "1f1b", Sgd(learning_rate=0.1), "fp16").stages
    before, ops = session.state(), session.adapter
    gradients = {name: ops.zeros_like(tensor) + 1 for name, tensor in session.trainable.parameters.items()}
    if mesh.after is None:
        gradients["transformer.ln_f.weight"] = gradients["transformer.ln_f.weight"] * np.inf
    session.update(gradients)
    after = session.state()
    return sorted(name for name in before if not np.array_equal(before[name], after[name]))


def drifted(framework: str, mesh: Mesh) -> list[str]:
    """What `check_ranks` says of ranks in step, and once a weight on the last rank is another."""
    session, told = Pair(framework, mesh, "1f1b").stages, list[str]()
    for number in range(2):
        if number and mesh.topology.rank == RANKS - 1:
            own = session.trainable.parameters["transformer.ln_f.weight"]
            session.adapter.assign(own, own * 1.001)
        try:
            check_ranks(session, mesh, number)
            told.append("")
        except RunError as error:
            told.append(str(error))
    return told


def main(framework: str, report: Path, *cases: str) -> None:
    adapter = adapters.load(framework)
    sizes = {"2": (2, 1), "4": (4, 1), "in parts": (2, 2), "in data": (1, 2)}
    if cases == (THREE_AXES,):
        sizes = {THREE_AXES: (2, 2)}
    ranks = int(os.environ["HOROVOD_SIZE"])
    wanted = dict.fromkeys(group for axes in sizes.values() for group in sets(ranks, *axes))
    world = adapter.init("cpu", threads=1, sets=list(wanted))
    meshes = {name: Mesh(world, *axes, adapter.process_set) for name, axes in sizes.items()}
    found: dict[str, Any] = {}
    for case in cases:
        schedule, _, mesh = case.partition(" ")
        if case == THREE_AXES:
            found[case] = on_three_axes(framework, meshes[case])
        elif case == "planted":
            found[case] = planted(framework, meshes["2"])
        elif case == "counted":
            found[case] = {name: counted(framework, meshes[name]) for name in ("2", "4")}
        elif case == "overflow":
            found[case] = overflowed(framework, meshes["2"]) if "fp16" in adapter.CAPABILITIES else None
        elif case == "few":
            found[case] = trained(framework, meshes["in parts"], "1f1b", few=True)
        elif case == "shares of stages":
            found[case] = trained(framework, meshes["2"], "1f1b", shards=True)
        elif case == "shares of parts":
            found[case] = trained(framework, meshes["in data"], "", shards=True)
        elif case == "shares with faults":
            found[case] = shares_with_faults(framework, meshes["in data"])
        elif case == "dropout":
            both = meshes["2"], meshes["in parts"]
            found[case] = dropped_out(*both) if framework == "pytorch" else masked(framework, *both)
        elif case == "drifted":
            found[case] = {name: drifted(framework, meshes[name]) for name in ("2", "in parts")}
        else:
            found[case] = trained(framework, meshes[mesh], schedule)
    everyone = adapter.allgather_object(found, next(iter(meshes.values())).world, name="report")
    if world.rank == 0:
        report.write_text(json.dumps(everyone))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
