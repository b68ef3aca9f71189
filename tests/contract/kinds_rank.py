"""One rank that trains a model of all kinds of tensors: `python tests/contract/kinds_rank.py FRAMEWORK FOLDER`.

For each stage of sharding it trains without a stop, and once more from the first checkpoint, in folders of FOLDER. Each
rank writes `rank-RANK.json` there: the faults that it has noticed, and how models that cannot be trained are refused.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core import metrics
from hvdkit.core.group import world_of
from hvdkit.core.session import Session
from hvdkit.core.state import digest
from hvdkit.errors import RequestError
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import Loss, Recipe, Sgd
from hvdkit.worker import train
from hvdkit.worker.setup import RankScript
from tests.contract.kinds import Task, refused


def recipe(framework: str, sharding: str) -> Recipe:
    document = {
        "name": "kinds",
        "model": {"name": "own", "script": "kinds.py", "classes": 2, "options": {"framework": framework}},
        "data": {"name": "own"},
        "batch_size": 8,
        "epochs": 2,
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "clip_norm": 1.0},
        "schedule": {"scale": "none", "decay": "constant"},
        "threads": 1,
        "sharding": sharding,
        "checkpoint": {"every_epochs": 1, "keep": 9},
        "check_ranks": 2,
        "average_weights": {"decay": 0.9},
    }
    return Recipe.model_validate(document)


def refusal(adapter: Any, build: Any) -> str:
    try:
        Session(adapter, build(), Sgd(learning_rate=0.1), Loss()).predict(np.ones((4, 6), np.int64))
    except RequestError as error:
        return str(error)
    return "it trains"


def main(framework: str, folder: Path) -> None:
    adapter: Any = adapters.load(framework)
    topology, shutdown = adapter.init("cpu", 1), adapter.shutdown
    world = world_of(topology)
    adapter.init, adapter.shutdown = (lambda *_: topology), (lambda: None)  # one Horovod for all runs
    faults: list[str] = []
    evaluate = metrics.evaluate

    def checked(adapter: Any, session: Any, *rest: Any) -> dict[str, float]:
        own = session.model_state() | {name: session.array(each) for name, each in session.trainable.transient.items()}
        mine = {name: digest([(name, value)]) for name, value in own.items()}
        other = adapter.allgather_object(mine, world, name="one_model")[0]
        faults.extend(f"{name} differs at the evaluation" for name in mine if mine[name] != other[name])
        return evaluate(adapter, session, *rest)

    metrics.evaluate = checked
    script = RankScript(Task.build, Task)
    gradients = ["gradients"] if "shard-gradients" in adapter.CAPABILITIES else []
    for sharding in ("none", "optimizer", *gradients):
        whole, resumed = folder / f"{sharding}-straight", folder / f"{sharding}-stopped"
        whole.mkdir(exist_ok=True)
        train.train(adapter, script, recipe(framework, sharding), whole, Heartbeat())
        if topology.is_root:
            (resumed / "checkpoints").mkdir(parents=True)
            shutil.copytree(whole / "checkpoints" / "step-00000004", resumed / "checkpoints" / "step-00000004")
        adapter.allgather_object(None, world, name="copied")
        train.train(adapter, script, recipe(framework, sharding), resumed, Heartbeat(), True)
    told = {name: refusal(adapter, build) for name, build in refused(framework).items()}
    (folder / f"rank-{topology.rank}.json").write_text(json.dumps({"faults": faults, "refused": told}))
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
