"""One rank of a real training run that goes wrong: `python tests/faults/rank.py FRAMEWORK FAULT CONFIG.yaml [...]`.

Rank 1 commits FAULT as it takes its fourth step (three updates are done); everything else is the recipe's own script.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from hvdkit import adapters
from hvdkit.core.session import Session
from hvdkit.heartbeat import Heartbeat
from hvdkit.worker.entry import main

FAULTY_RANK, STEP = 1, 3
ROOT = Path(__file__).resolve().parents[2]


def commit(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exits":
        os._exit(7)
    elif fault == "leaves":
        sys.exit(3)
    elif fault == "crashes":
        ctypes.string_at(0)
    elif fault == "raises":
        raise ValueError("the seventh image is upside down")
    elif fault == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        bytearray(2**31)
    elif fault == "sleeps":
        time.sleep(600)
    elif fault == "evaluates":  # and says so, while the others train
        heartbeat = Heartbeat()
        while True:
            heartbeat.beat("evaluation", STEP)
            time.sleep(0.1)
    elif fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise KeyError(fault)


def run(framework: str, fault: str, argv: list[str]) -> NoReturn:
    adapter: Any = adapters.load(framework)
    build = runpy.run_path(str(ROOT / "recipes" / framework / "resnet.py"))["build"]
    steps, set_rate = 0, Session.set_learning_rate

    def set_learning_rate(session: Session, value: float) -> None:
        nonlocal steps
        if steps == STEP and int(os.environ["HOROVOD_RANK"]) == FAULTY_RANK:
            commit(fault)
        steps += 1
        set_rate(session, value)

    Session.set_learning_rate = set_learning_rate
    main(adapter, build, argv)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
