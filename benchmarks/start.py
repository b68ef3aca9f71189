"""How long until a run begins: from the command to the end of the first step, beside two bare processes.

    .venv/bin/python -m benchmarks.start [--framework pytorch] [--rounds 7]

A round takes three starts directly after each other, in random order, each of two processes of one thread:
`plain/bare.py` twice at once (framework, model, optimizer, data, one step; no Horovod), `hvdkit train` by its direct
launcher, and by horovodrun. Both sides of a ratio are of one round. The first round, which may read from a cold disk,
is not counted. Bytecode is compiled before, as an installation and `make` do. Writes start.json and start.md beside
itself, where frameworks that were not asked for keep what they had; exit status 1 if a limit is missed and the interval
leaves no doubt.
"""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from benchmarks.harness import FRAMEWORKS, interval
from hvdkit.results.machine import this_machine
from hvdkit.runtimes.store import find

SIDES = ("bare", "direct", "horovodrun")
RATIO_MARK = 1.15
TIMEOUT_S = 180.0


def main() -> int:
    """The command line; returns the exit status."""
    args = harness.parser(__doc__, rounds=7, frameworks=True).parse_args()
    for part in ("hvdkit", "recipes", "benchmarks/plain"):
        compileall.compile_dir(harness.ROOT / part, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        taken = harness.rounds(Path(folder), args.framework or FRAMEWORKS, SIDES, args.rounds + 1, seconds)
    found = {name: summary(name, rounds[1:]) for name, rounds in taken.items()}
    file = args.out / "start.json"
    earlier: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"machine": None}
    known = found
    if earlier["machine"] == this_machine().model_dump():  # then what it has of other frameworks still holds
        known = earlier["frameworks"] | found
    outcome: dict[str, Any] = {
        "marks": {"direct_over_bare_at_most": RATIO_MARK},
        "frameworks": {name: known[name] for name in FRAMEWORKS if name in known},
    }
    written.publish("start", outcome, args.out)
    late = [name for name, one in found.items() if one["ratios"]["direct"]["low"] > RATIO_MARK]
    return 1 if late else 0


def summary(framework: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Seconds of each side by round, and their ratios to the bare one."""
    return {
        "seconds": {side: interval([one[side] for one in rounds], "each") for side in SIDES},
        "ratios": {side: interval([one[side] / one["bare"] for one in rounds]) for side in SIDES[1:]},
        "versions": find(framework).versions,
        "rounds": len(rounds),
        "measured": written.today(),
    }


def seconds(framework: str, _: int, side: str, out: Path) -> float:
    """From the command to the end of the slower process's first step. Raises RunError where a process fails."""
    if side == "bare":
        return bare(framework)
    began, keys = time.time(), ["threads=1", "epochs=1", "steps=1"]
    how = {"timeout_s": TIMEOUT_S, "env": {**os.environ, **harness.ONE_THREAD}}
    result = harness.train(framework, 2, "resnet20-digits", keys, out, ["--launcher", side], **how)
    assert result["startup_s"] < time.time() - began, "longer than the whole run"
    return float(result["startup_s"])


def bare(framework: str) -> float:
    """Two processes started together."""
    runtime = find(framework)
    environment = {**os.environ, **runtime.environment, **harness.ONE_THREAD}

    def process(_: int) -> float:
        command = [runtime.python, harness.HERE / "plain" / "bare.py", framework]
        return float(harness.run(command, TIMEOUT_S, env=environment, stderr=subprocess.PIPE).split()[-1])

    began = time.time()
    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(process, range(2))) - began


if __name__ == "__main__":
    harness.exit_with(main)
