"""Run the whole test suite again and again, as `make test` does, and keep what came of each run: `make prove`.

    .venv/bin/python scripts/prove_tests.py [--runs 10] [--fresh]

The runs take turns in CONDITIONS: plain, with a busy loop a core, and under nohup. Each adds a row to
benchmarks/suite.json, from which benchmarks/suite.md is made; its output stays in runs/prove-tests. A series that was
interrupted goes on behind its last row; --fresh begins a new one. Changes that are not committed are refused, since a
row names its commit. The exit status is 1 where a run of the series has failed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import harness

from hvdkit.errors import RequestError, RunError
from hvdkit.results.machine import this_machine

ROOT = Path(__file__).resolve().parent.parent
CONDITIONS = ("plain", "busy", "plain", "nohup", "plain", "busy", "plain", "plain", "busy", "plain")
COUNT = re.compile(r"(\d+) (passed|failed|errors|skipped)")
SUITE = [sys.executable, str(ROOT / "scripts" / "run_tests.py")]


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__)
    parser.add_argument("--runs", type=harness.positive, default=10, help="in the whole series (default 10)")
    parser.add_argument("--fresh", action="store_true", help="begin a new series")
    args = parser.parse_args()
    file = args.out / "suite.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() and not args.fresh else []
    for number, condition in enumerate(itertools.islice(itertools.cycle(CONDITIONS), args.runs), start=1):
        if number > len(rows):
            rows.append(one_run(number, condition))
            harness.publish("suite", {"rows": rows}, args.out)
    bad = [number for number, row in enumerate(rows, start=1) if row["exit_status"]]
    print(f"{len(rows) - len(bad)} of {len(rows)} runs passed" + "".join(f"; run {number} did not" for number in bad))
    return int(bool(bad))


def one_run(number: int, condition: str) -> dict[str, Any]:
    """The row of a run of the whole suite. Raises RunError where it ended without its summary."""
    commit, output = committed(), ROOT / "runs" / "prove-tests" / f"{number:02d}-{condition}.log"
    output.parent.mkdir(parents=True, exist_ok=True)
    harness.say(f"run {number}, {condition}: output in {output.relative_to(ROOT)}")
    began = time.monotonic()
    with output.open("wb") as file, busy(this_machine().cores if condition == "busy" else 0):
        command = ["nohup", *SUITE] if condition == "nohup" else SUITE
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
    seconds = round(time.monotonic() - began)
    *lines, last = output.read_text(errors="replace").splitlines() or [""]
    found = {name: int(count) for count, name in COUNT.findall(last)}
    if "passed" not in found:
        raise RunError(f"{output}: the suite ended with status {status} and without its summary")
    counts = {name: found.get(name, 0) for name in ("passed", "failed", "errors", "skipped")}
    bad = [line.removeprefix("not passed: ") for line in lines if line.startswith(("not passed: ", "left behind "))]
    return {
        "commit": commit,
        "condition": condition,
        **counts,
        "exit_status": status,
        "not_passed": bad,
        "seconds": seconds,
        "machine": harness.machine_line(this_machine().model_dump()),
    }


def committed() -> str:
    """The commit whose files are here. Raises RequestError where a file differs from it, the results excepted."""
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/suite.json", ":!benchmarks/suite.md")
    if changed:
        raise RequestError(f"expected a checkout without changes, got\n{changed}\ncommit or stash them")
    return git("rev-parse", "--short=10", "HEAD")


def git(*arguments: str) -> str:
    """What git prints."""
    return harness.run(["git", "-C", ROOT, *arguments]).rstrip()


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that never rest."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    harness.exit_with(main)
