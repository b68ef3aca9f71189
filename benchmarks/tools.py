"""How long the quick commands take, from beginning to end: help, predict, report, doctor; `make bench-tools`.

    .venv/bin/python -m benchmarks.tools [--runs 10]

The commands take turns. A first run of each is not counted: it fills the file cache and makes Matplotlib's list of
fonts, without which the first report on a machine takes seconds longer. `report` is timed on the tests' comparison
(four frameworks at one and two ranks, what `make compare` leaves), `doctor` with the runtimes that are there. Writes
tools.json and tools.md beside itself; exit status 1 where a median misses its limit, 2 where a command fails.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from benchmarks.anchored import measured
from hvdkit.errors import RequestError, RunError
from hvdkit.runtimes import store

TIMEOUT_S = 120.0
MARKS_S = {"--help": 0.25, "predict": 1.0, "report": 2.5, "doctor": 4.0}
SMALL = harness.HERE.parent / "tests" / "data" / "comparison"  # four frameworks at one and two ranks, one round


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__)
    parser.add_argument("--runs", type=harness.positive, default=10, help="of each command, counted (default 10)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdkit-tools-") as folder:
        asked = commands(Path(folder))

        def run(_: str, number: int, name: str, out: Path) -> float:
            return harness.hvdkit(asked[name], TIMEOUT_S)

        try:
            rounds = harness.rounds(Path(folder), ["taken"], list(asked), args.runs + 1, run)["taken"][1:]
        except RunError as error:
            raise RequestError(str(error)) from None
    seconds: dict[str, dict[str, Any]] = {
        name: harness.median_and_range([each[name] for each in rounds])
        | {"each": [round(each[name], 3) for each in rounds], "mark": mark}
        for name, mark in MARKS_S.items()
    }
    runtimes = {runtime.name: runtime.versions for runtime in store.installed()}
    written.publish("tools", {"runtimes": runtimes, "seconds": seconds}, args.out)
    missed = [name for name, each in seconds.items() if each["median"] > each["mark"]]
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


def commands(folder: Path) -> dict[str, list[str]]:
    """The arguments of `hvdkit` by their names in `MARKS_S`; what they read and write is in `folder`."""
    profiles = measured(harness.HERE / "own-hosts-profiles.json.gz")
    (folder / "profile.json").write_text(json.dumps(profiles["pytorch"]["dense"]))  # ResNet-20, two hosts
    predict = ["predict", str(folder / "profile.json"), "--cluster", "p100-roce25", "-n", "8", "-n", "512"]
    shutil.copytree(SMALL, folder / "small")
    return {
        "--help": ["--help"],
        "predict": [*predict, "--set", "speed=30", "--out", str(folder / "predicted"), "--overwrite"],
        "report": ["report", str(folder / "small")],
        "doctor": ["doctor"],
    }


if __name__ == "__main__":
    harness.exit_with(main)
