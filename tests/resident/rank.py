"""A rank that stays and takes cases one by one, from tests/residents.py.

usage: python tests/resident/rank.py FRAMEWORK CASES      (FRAMEWORK is for tests/warm, which shares its import)

CASES is a folder: `<n>.json` asks all ranks for one of `WORK`, `<n>.rank-<r>.json` answers with its value, with the
request that it refuses or with its fault; null ends them. Horovod is entered by the first case and not left between
cases, so all cases of one process have the same ranks and as many threads.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, as in a recipe's script

import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hvdkit import adapters
from hvdkit.core.group import Ranks, Topology
from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.handlers import stopping
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.worker.inference import evaluate as evaluate_
from hvdkit.worker.setup import RankScript
from hvdkit.worker.train import train as train_

ROOT = Path(__file__).resolve().parents[2]
RANK = int(os.environ["HOROVOD_RANK"])
POLL_S = 0.02
entered: list[Topology] = []
leave: list[Callable[[], None]] = []


class Holding(Heartbeat):
    """Stands still, for good, before the update behind `step`. Rank 1 is asked to stop after update `stop_at`."""

    step = stop_at = -1

    def asked_to_stop(self) -> bool:
        return RANK == 1 and self.updates + 1 == self.stop_at  # the update that ends now is not reported yet

    def beat(self, phase: str, step: int | None = None) -> None:
        super().beat(phase, step)
        while phase == "train step" and step == self.step:
            time.sleep(1)


@cache
def adapter_of(framework: str) -> Any:
    """The adapter, which enters Horovod once and does not leave it."""
    adapter: Any = adapters.load(framework)
    enter, shutdown = adapter.init, adapter.shutdown

    def init(device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        assert not sets  # Horovod makes them when it starts
        if not entered:
            entered.append(enter(device, threads))
            leave.append(shutdown)
        return entered[0]

    adapter.init, adapter.shutdown = init, lambda: None
    return adapter


@cache
def script_of(framework: str, name: str) -> RankScript:
    """The script of `recipes/` with that name."""
    return RankScript(runpy.run_path(str(ROOT / "recipes" / framework / f"{name}.py"))["build"])


def train(
    framework: str,
    recipe: str,
    overrides: list[str],
    out: str,
    resume: bool = False,
    hold_at: int = -1,
    stop_at: int = -1,
) -> dict[str, Any]:
    """What `hvdkit train` has its ranks do; the result."""
    heartbeat = Holding()
    heartbeat.step, heartbeat.stop_at = hold_at, stop_at
    stopping.LOOK_S = 0.0  # after each update
    asked = schema.load(Path(recipe), overrides)
    Path(out).mkdir(parents=True, exist_ok=True)
    adapter, script = adapter_of(framework), script_of(framework, asked.model.SCRIPT)
    return train_(adapter, script, asked, Path(out), heartbeat, resume).model_dump(mode="json")


def evaluate(framework: str, checkpoint: str, recipe: dict[str, Any], out: str) -> None:
    """What `hvdkit evaluate` has its ranks do."""
    Path(out).mkdir(parents=True, exist_ok=True)
    asked = Recipe.model_validate(recipe)
    adapter, script = adapter_of(framework), script_of(framework, asked.model.SCRIPT)
    evaluate_(adapter, script, asked, Path(checkpoint), Path(out), Heartbeat())


WORK: dict[str, Callable[..., Any]] = {"train": train, "evaluate": evaluate}


def main(cases: Path) -> None:
    write_atomic(cases / f"rank-{RANK}.pid", str(os.getpid()))
    number = 0
    while True:
        asked = cases / f"{number}.json"
        while not asked.exists():
            time.sleep(POLL_S)
        case = json.loads(asked.read_text())
        if case is None:
            break
        answer: dict[str, Any] = {"value": None, "refused": None, "fault": None}
        try:
            answer["value"] = WORK[case["work"]](**case["arguments"])
        except HvdkitError as error:
            answer["refused"] = {"status": error.exit_status, "message": str(error)}
        except Exception:
            answer["fault"] = traceback.format_exc()
        write_atomic(cases / f"{number}.rank-{RANK}.json", json.dumps(answer))
        number += 1
    for shutdown in leave:
        shutdown()
    os._exit(0)  # as a rank of a recipe ends, without the framework's farewell


if __name__ == "__main__":
    main(Path(sys.argv[2]))
