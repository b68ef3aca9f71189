"""How long the quick commands take, from beginning to end: help, predict, report, doctor; `make bench-tools`.

    .venv/bin/python benchmarks/tools.py [--runs 10]

The commands take turns. A first run of each is not counted: it fills the file cache and makes Matplotlib's list of
fonts, without which the first report on a machine takes seconds longer. `report` is timed on the tests' comparison
(four frameworks at one and two ranks, what `make compare` leaves) and on one of 100 runs (every rival, five rounds);
`doctor` with the runtimes that are there. Writes tools.json and tools.md beside itself; exit status 1 where a median
misses its mark, 2 where a command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import commands
import tools_inputs

from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.runtimes import store

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 120
MARKS_S = {"--help": 0.25, "predict": 1.0, "report": 2.5, "report, 100 runs": 2.5, "doctor": 4.0}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each command, counted (default 10)")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs: expected 1 or more, got {args.runs}")
    try:
        with tempfile.TemporaryDirectory(prefix="hvdkit-tools-") as folder:
            seconds = measure(asked(Path(folder)), args.runs)
    except HvdkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = {
        "command": "python benchmarks/tools.py",
        "runtimes": {runtime.name: runtime.versions for runtime in store.installed()},
        "seconds": {name: spread(values) | {"mark": MARKS_S[name]} for name, values in seconds.items()},
        "measured": time.strftime("%-d %B %Y", time.gmtime()),
        "machine": this_machine().model_dump(),
    }
    write_atomic(HERE / "tools.json", json.dumps(found, indent=2) + "\n")
    write_atomic(HERE / "tools.md", page(found))
    print(page(found))
    missed = [name for name, each in found["seconds"].items() if each["median"] > each["mark"]]
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


def asked(folder: Path) -> dict[str, list[str]]:
    """The commands by their names in `MARKS_S`; what they read and write is in `folder`."""
    small = shutil.copytree(tools_inputs.SMALL, folder / "small")
    (folder / "large").mkdir()
    large = tools_inputs.large(folder / "large")
    profile = tools_inputs.profile(folder / "profile.json")
    predict = ["predict", str(profile), "--cluster", "p100-roce25", "-n", "8", "-n", "512", "--set", "speed=30"]
    return {
        "--help": ["--help"],
        "predict": [*predict, "--out", str(folder / "predicted"), "--overwrite"],
        "report": ["report", str(small)],
        "report, 100 runs": ["report", str(large)],
        "doctor": ["doctor"],
    }


def measure(commands_: dict[str, list[str]], runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each command, which take turns. Raises RunError where one fails."""
    taken: dict[str, list[float]] = {name: [] for name in commands_}
    for number in range(runs + 1):
        for name, arguments in commands_.items():
            began = time.perf_counter()
            commands.hvdkit(subprocess.run, arguments, TIMEOUT_S)
            if number:
                taken[name].append(time.perf_counter() - began)
        told = f"run {number} of {runs}" if number else "not counted"
        print(f"{told}: load {os.getloadavg()[0]:.1f}", flush=True)
    return taken


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least and most, and each."""
    each = [round(value, 3) for value in values]
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "each": each}


def page(found: dict[str, Any]) -> str:
    """`tools.md`."""
    machine = found["machine"]
    lines = [
        "# How long the quick commands take",
        "",
        "Seconds from a command's start to its end. `report`: the page of 8 runs, four frameworks at one and two "
        "ranks; of 100 runs, every rival in five rounds. `predict`: a profile of ResNet-20 for two numbers of ranks, "
        "with its picture. `doctor`: one process for each of the runtimes, which imports the framework and Horovod.",
        "",
        "| `hvdkit …` | median | least to most | runs | mark |",
        "|:---|---:|---:|---:|---:|",
    ]
    for name, each in found["seconds"].items():
        range_ = f"{each['low']:.2f}–{each['high']:.2f}"
        lines.append(f"| {name} | {each['median']:.2f} | {range_} | {len(each['each'])} | {each['mark']:g} |")
    runtimes = ", ".join(found["runtimes"]) or "none"
    lines += [
        "",
        f"Runtimes: {runtimes}. {machine['processor']}, {machine['cores']} cores, {machine['memory_mib']} MiB, "
        f"{machine['system']}, {found['measured']}. Made by `{found['command']}`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
