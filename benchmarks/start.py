"""How long until a run begins: from the command to the end of the first step, beside two bare processes.

    .venv/bin/python benchmarks/start.py [--framework pytorch] [--rounds 7]

A round takes three starts directly after each other, in random order, each of two processes of one thread: `bare.py`
twice at once (framework, network, optimizer, data, one step; no Horovod), `hvdkit train` by its direct launcher, and by
horovodrun. Both sides of a ratio are of one round. The first round, which may read from a cold disk, is not counted.
Also the time of `hvdkit --help`. Writes start.json and start.md beside itself, where frameworks that were not asked for
keep what they had; exit status 1 where a mark is missed beyond the doubt that the interval leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import commands
from ratios import interval, told

from hvdkit.errors import HvdkitError, RunError
from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.results.train import read_result
from hvdkit.runtimes.store import find

HERE = Path(__file__).resolve().parent
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
SIDES = ("bare", "direct", "horovodrun")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
RATIO_MARK, HELP_MARK_S, HELPS = 1.15, 0.35, 20
TIMEOUT_S = 180


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=7, help="that count, of each framework (default 7)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {args.rounds}")
    try:
        found = {name: measure(name, args.rounds) for name in args.framework or FRAMEWORKS}
    except HvdkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    helps = [help_seconds() for _ in range(HELPS + 1)][1:]
    outcome: dict[str, Any] = {
        "command": "python benchmarks/start.py",
        "marks": {"direct_over_bare_at_most": RATIO_MARK, "help_s_at_most": HELP_MARK_S},
        "frameworks": {},
        "help_s": spread(helps),
        "machine": this_machine().model_dump(),
    }
    earlier = json.loads((HERE / "start.json").read_text()) if (HERE / "start.json").exists() else outcome
    if earlier["machine"] == outcome["machine"]:  # then what it has of other frameworks still stands
        outcome["frameworks"] = earlier["frameworks"]
    known = outcome["frameworks"] | found
    outcome["frameworks"] = {name: known[name] for name in FRAMEWORKS if name in known}
    write_atomic(HERE / "start.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(HERE / "start.md", page(outcome))
    print(page(outcome))
    late = [name for name, one in found.items() if one["ratios"]["direct"]["low"] > RATIO_MARK]
    return 1 if late or outcome["help_s"]["low"] > HELP_MARK_S else 0


def measure(framework: str, rounds: int) -> dict[str, Any]:
    """Seconds of each side by round, and their ratios to the bare one."""
    taken: list[dict[str, float]] = []
    for number in range(rounds + 1):
        order = list(SIDES)
        random.Random(f"{framework} {number}").shuffle(order)
        taken.append({side: seconds(framework, side) for side in order})
        times = ", ".join(f"{side} {taken[-1][side]:.2f} s" for side in SIDES)
        print(f"{framework}, {f'round {number} of {rounds}' if number else 'not counted'}: {times}", flush=True)
    counted = taken[1:]
    return {
        "seconds": {side: spread([one[side] for one in counted]) for side in SIDES},
        "ratios": {side: interval([one[side] / one["bare"] for one in counted]) for side in SIDES[1:]},
        "versions": find(framework).versions,
        "rounds": rounds,
        "measured": time.strftime("%-d %B %Y", time.gmtime()),
    }


def seconds(framework: str, side: str) -> float:
    """From the command to the end of the slower process's first step. Raises RunError where a process fails."""
    return bare(framework) if side == "bare" else hvdkit(framework, side)


def spread(values: list[float]) -> dict[str, Any]:
    """Their median and its interval, and each."""
    found = interval(values)
    each = found.pop("ratios")
    return found | {"each": each}


def bare(framework: str) -> float:
    """Two processes started together."""
    runtime = find(framework)
    command = [str(runtime.python), str(HERE / "bare.py"), framework]
    environment = {**os.environ, **runtime.environment, **ONE_THREAD}
    began = time.time()
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in both]
    except subprocess.TimeoutExpired:
        raise RunError(f"{' '.join(command)}: no end within {TIMEOUT_S} s") from None
    finally:
        for process in both:
            process.kill()
            process.wait()
    if any(process.returncode for process in both):
        raise RunError(f"{' '.join(command)}: {said[0][1] or said[1][1]}")
    return max(float(out.split()[-1]) for out, _ in said) - began


def hvdkit(framework: str, launcher: str) -> float:
    """`hvdkit train` at two ranks."""
    arguments = ["train", "resnet20-digits", "--framework", framework, "-np", "2", "--launcher", launcher]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        began = time.time()
        commands.hvdkit(
            subprocess.run,
            [*arguments, "--out", str(out), "threads=1", "epochs=1", "steps=1", "checkpoint=null"],
            TIMEOUT_S,
            env={**os.environ, **ONE_THREAD},
        )
        startup = read_result(out / "result.json").startup_s
        assert startup is not None and startup < time.time() - began, "a result tells of more than there was"
        return startup


def help_seconds() -> float:
    """`hvdkit --help`, from beginning to end."""
    began = time.perf_counter()
    commands.hvdkit(subprocess.run, ["--help"], TIMEOUT_S)
    return time.perf_counter() - began


def page(outcome: dict[str, Any]) -> str:
    """`start.md`."""
    machine = outcome["machine"]
    lines = [
        "# How long until a run begins",
        "",
        "From the command to the end of the slower process's first step, in seconds: ResNet-20 on the digits, 32 "
        "images, two processes of one thread. Bare: `benchmarks/bare.py` twice at once, without Horovod. Medians over "
        "interleaved rounds with their 95 % bootstrap intervals; ratios are of the same round.",
        "",
        "| framework | bare | hvdkit, direct | hvdkit, horovodrun | direct ÷ bare | horovodrun ÷ bare | rounds |",
        "|:---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in outcome["frameworks"].items():
        cells = [told(one["seconds"][side], 2) for side in SIDES] + [told(one["ratios"][side], 2) for side in SIDES[1:]]
        lines.append(f"| {name} {one['versions'].get(PACKAGES[name], '')} | {' | '.join(cells)} | {one['rounds']} |")
    lines += [
        "",
        f"Mark: direct ÷ bare at most {RATIO_MARK}. `hvdkit --help`: {told(outcome['help_s'], 2)} s, {HELPS} times, at "
        f"most {max(outcome['help_s']['each']):.2f} s (mark: {HELP_MARK_S} s).",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_mib']} MiB, {machine['system']}. "
        f"Made by `{outcome['command']}`.",
    ]
    return "\n".join(lines) + "\n"


PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow", "keras": "keras", "mxnet": "mxnet"}

if __name__ == "__main__":
    sys.exit(main())
