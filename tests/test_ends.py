"""How ranks end: who is named first, the status, and the remedy. The table is data; a cell is a real run of two ranks.

HVDKIT_TEST_ALL_ENDS=1 runs every way to end, of rank 0, rank 1 and both, in every phase, and notes it in ends.json.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hvdkit.runtimes import store
from tests.conftest import ROOT, run

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

FAULTS = ROOT / "tests" / "faults"
# A run by a script of the user's own, and one by a recipe's, in which sitecustomize.py plants the fault.
KINDS = {
    "script": [ROOT / "tests" / "debugging" / "recipe.yaml", f"model.script={FAULTS / 'ends.py'}"],
    "recipe": ["resnet20-digits", "model.name=resnet8", "--framework", "mxnet", "steps=30", "tune=none", "threads=1"],
}
# The phase in which it ends, and from which update on. At `top` Horovod has not started.
PHASES = {"top": 0, "building": 0, "input": 4, "evaluation": 10, "checkpoint": 8}
BEFORE = ("top", "building")
# What the first line says of the rank that has ended so, once training has begun.
SAID = {
    "sys.exit(0)": r"failed at step \d+: .*SystemExit: 0; it left before its work was done",
    "sys.exit(3)": r"failed at step \d+: .*SystemExit: 3; .*\(ended with exit code 3 ",
    "sys.exit(text)": r"failed at step \d+: .*SystemExit: nothing left to learn",
    "os._exit(0)": r"ended with exit code 0 after [\d.]+ s, before its work was done",
    "os._exit(3)": r"ended with exit code 3 after",
    "speak": r"ended with exit code 3 after",
    "raise": r"failed at step \d+: .*ValueError: the seventh",
    "interrupt": r"failed at step \d+: KeyboardInterrupt: it got SIGINT, or its code raised it",
    "memory": r"failed at step \d+: .*MemoryError.*; use a smaller batch_size",
    **{name: f"was killed by {name} after" for name in ("SIGTERM", "SIGHUP", "SIGSEGV", "SIGABRT", "SIGBUS")},
    "SIGKILL": "was killed by SIGKILL after .*hvdkit has not sent it",
    "SIGINT": r"failed at step \d+: KeyboardInterrupt: it got SIGINT",
    "SIGXCPU": "was killed by SIGXCPU after .*ulimit -t",
}
# What a script of the user's own raises before the first update is a fault of the request, as all ranks run the script.
REFUSED = {
    "sys.exit(0)": "SystemExit: 0; it left before its work was done",
    "sys.exit(3)": "SystemExit: 3; it left before its work was done",
    "sys.exit(text)": "SystemExit: nothing left to learn",
    "raise": "ValueError: the seventh",
    "memory": "MemoryError.*; use a smaller batch_size",
}
WELL = ("close", "fork", "SIGPIPE")  # training goes on: Python ignores SIGPIPE
CELLS = [
    ("script", "1", "input", "os._exit(0)"),
    ("script", "0,1", "input", "sys.exit(0)"),
    ("script", "0", "checkpoint", "SIGHUP"),
    ("script", "1", "evaluation", "sys.exit(3)"),
    ("script", "1", "input", "speak"),
    ("script", "1", "checkpoint", "memory"),
    ("script", "0", "input", "close"),
    ("script", "0", "input", "fork"),
    ("script", "1", "building", "sys.exit(3)"),
    ("script", "0,1", "top", "sys.exit(0)"),
    ("script", "0,1", "top", "os._exit(0)"),
    ("recipe", "1", "building", "SIGSEGV"),
    ("recipe", "0", "checkpoint", "SIGKILL"),
]
STOPS = [
    ("script", "checkpoint", "SIGINT", "kept"),
    ("recipe", "building", "SIGTERM", "kept"),
    ("recipe", "input", "SIGHUP", "none"),
]
SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGKILL", "SIGSEGV")
ALL = "HVDKIT_TEST_ALL_ENDS"
if ALL in os.environ:
    RANKS = ("0", "1", "0,1")
    CELLS = [cell for cell in CELLS if "top" in cell]
    CELLS += product(("script",), RANKS, [*PHASES][1:], (*SAID, *WELL))
    CELLS += product(("recipe",), RANKS, ("building", "input", "checkpoint"), ("os._exit(0)", *SIGNALS))
    CELLS += product(("recipe",), ("1",), ("building", "input"), ("sys.exit(3)", "raise", "memory", "close"))
    STOPS = list(product(KINDS, ("building", "input", "checkpoint"), SIGNALS[:3], ("kept",)))
    STOPS += product(KINDS, ("building", "input"), SIGNALS[:3], ("none",))


Outcomes = dict[tuple[str, str, str, str], str]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    """What came of each cell: the exit status where all is as expected, else `wrong`. The whole table is noted."""
    found: Outcomes = {}
    yield found
    if ALL in os.environ:
        _note(ROOT / "tests" / "ends.json", found)


def _note(path: Path, found: Outcomes) -> None:
    """Add outcomes to the file; parts of the table may run side by side."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        table = json.loads(file.read() or "{}").get("table", {})
        for (kind, how, phase, ranks), status in found.items():
            table.setdefault(f"{kind}: {how}", {}).setdefault(phase, {})[ranks] = status
        cells = [status for row in table.values() for phase in row.values() for status in phase.values()]
        rows = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items())]
        made = [runtime.versions for name in ("pytorch", "mxnet") if (runtime := store.load(name))]
        versions = {
            name: each[name] for each in made for name in ("hvdkit", "horovod", "torch", "mxnet") if name in each
        }
        facts = {
            "command": f"{ALL}=1 python -m pytest tests/test_ends.py",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version(), **versions},
            "meaning": "kind: way to end; phase; ranks (or checkpoints, for a signal to hvdkit): the exit status",
            "cells": len(cells),
            "of": len(CELLS) + len(STOPS),
            "wrong": cells.count("wrong"),
        }
        head = json.dumps(facts, indent=2).removesuffix("\n}")
        file.truncate(0)
        file.write(f'{head},\n  "table": {{\n' + ",\n".join(rows) + "\n  }\n}\n")


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A run of two ranks in which `planted` happens. The variable LAUNCHER has the process of hvdkit."""

    def call(kind: str, planted: str, checkpoint: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "hvdkit", "train", *KINDS[kind], "-np", 2, "--out", "run", checkpoint]
        environment = os.environ | {"PLANTED": planted}
        if kind == "recipe":
            environment["PYTHONPATH"] = str(FAULTS / "in_recipes")
        elif planted.endswith(" fork"):  # its agent has to see the rank's children, so the rank is no warm one
            environment["PYTHONPATH"] = str(FAULTS)
        command = ["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh", *map(str, words)]
        done = run(command, 120, cwd=tmp_path, env=environment)
        assert not set("\x1b\x07\x9b\u202e") & set(done.stdout + done.stderr), "they stay off the terminal"
        return done

    return call


@pytest.mark.parametrize(("kind", "ranks", "phase", "how"), CELLS)
def test_the_rank_that_ended_first_is_named_first(
    kind: str, ranks: str, phase: str, how: str, train: Any, outcomes: Outcomes, tmp_path: Path
) -> None:
    outcomes[kind, how, phase, ranks] = "wrong"
    done = train(kind, f"{ranks} {phase} {PHASES[phase]} {how}", "checkpoint.every_steps=8")
    first = next((line for line in done.stderr.splitlines() if re.match(r"rank \d on|model.script: ", line)), "")
    kept = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    if how in WELL:
        assert (done.returncode, first) == (0, ""), done.stderr
    elif kind == "script" and phase in BEFORE and how in REFUSED:
        assert done.returncode == 2 and re.search(f"ends|planted.*, line .*: {REFUSED[how]}", first), done.stderr
    else:
        said = SAID[how].replace(r" at step \d+", "") if phase in BEFORE else SAID[how]
        assert done.returncode == 1 and re.match(f"rank [{ranks}] on localhost {said}", first), done.stderr
    assert ("continue with --resume" in done.stderr) == (bool(kept) and how not in WELL), done.stderr
    assert (tmp_path / "run" / "result.json").exists() == (how in WELL)
    outcomes[kind, how, phase, ranks] = str(done.returncode)


@pytest.mark.parametrize(("kind", "phase", "name", "kept"), STOPS)
def test_a_signal_to_hvdkit_is_named(
    kind: str, phase: str, name: str, kept: str, train: Any, outcomes: Outcomes, tmp_path: Path
) -> None:
    """SIGTERM and SIGHUP end training after a checkpoint, with status 0, where the recipe keeps any."""
    outcomes[kind, f"hvdkit {name}", phase, kept] = "wrong"
    done = train(
        kind,
        f"0 {phase} {PHASES[phase]} hvdkit {name}",
        f"checkpoint={'{every_steps: 8}' if kept == 'kept' else 'null'}",
    )
    there = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    told = done.stdout + done.stderr
    if kept == "kept" and name != "SIGINT":
        assert done.returncode == 0 and f"stopped by {name} " in told, told
        assert there or "before the first checkpoint" in told
    else:
        status = 128 + signal.Signals[name]
        said = "" if name == "SIGINT" else f"ended by {name}, and all ranks with it"
        assert done.returncode == status and said in told, told
    assert ("continue with --resume" in told) == bool(there), told
    assert "rank 0 on" not in told and not (tmp_path / "run" / "result.json").exists(), told
    outcomes[kind, f"hvdkit {name}", phase, kept] = str(done.returncode)
