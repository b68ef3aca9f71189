"""Whether training leaks: resident memory over 2,000 steps, with evaluations and checkpoints.

    .venv/bin/python -m benchmarks.memory [--framework pytorch] [--steps 2000]

ResNet-8 on the digits, two ranks of one thread. Each line of metrics.jsonl has rank 0's memory. The first tenth of the
steps, in which caches fill, is left out; of the rest, the median of the last fifth of the lines may be 2 % more than
that of the first fifth. Other processes on the machine do not matter. Runs that are done are kept in `runs/memory`, and
frameworks that were not asked for keep their rows. Writes memory.json and memory.md beside itself; exit status 1 if the
memory of one grew.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from benchmarks.harness import FRAMEWORKS
from hvdkit.results.train import read_metrics, read_result
from hvdkit.runtimes.store import find

RANKS, EVERY, LIMIT_PERCENT = 2, 20, 2.0
LEFT_OUT, SHARE = 0.1, 0.2  # of the steps, and of the lines behind them
KEYS = ["model.name=resnet8", "batch_size=8", "threads=1", f"log_every={EVERY}", "checkpoint.every_steps=100"]
STEPS_PER_EPOCH = 1437 // (8 * RANKS)


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, keep="memory", frameworks=True)
    parser.add_argument("--steps", type=harness.positive, default=2000, help="how many (default 2000)")
    args = parser.parse_args()
    if args.steps * (1 - LEFT_OUT) * SHARE < 2 * EVERY:
        parser.error(f"--steps {args.steps}: expected at least {int(2 * EVERY / SHARE / (1 - LEFT_OUT)) + 1}")
    keep, file = harness.kept(args), args.out / "memory.json"
    earlier: dict[str, Any] = json.loads(file.read_text())["frameworks"] if file.exists() else {}
    for name in args.framework or FRAMEWORKS:
        folder = keep / f"{name}-{args.steps}"
        if not (folder / "result.json").exists():
            harness.say(f"{name}: {args.steps} steps")
            train(name, args.steps, folder)
        earlier[name] = row(name, folder)
        rows = {each: earlier[each] for each in FRAMEWORKS if each in earlier}
        written.publish("memory", {"limit_percent": LIMIT_PERCENT, "left_out": LEFT_OUT, "frameworks": rows}, args.out)
    return 1 if any(each["growth_percent"] > LIMIT_PERCENT for each in earlier.values()) else 0


def train(framework: str, steps: int, folder: Path) -> None:
    """Train into the folder. Raises RunError where that fails."""
    where = ["--framework", framework, "-np", str(RANKS), "--out", folder, "--overwrite"]
    length = [f"steps={steps}", f"epochs={-(-steps // STEPS_PER_EPOCH)}"]
    harness.hvdkit(["train", "resnet20-digits", *where, *KEYS, *length], timeout_s=3600)


def row(framework: str, folder: Path) -> dict[str, Any]:
    """A framework's row, from its run's metrics.jsonl."""
    result = read_result(folder / "result.json")
    lines = [(line.step, line.rss_mib) for line in read_metrics(folder / "metrics.jsonl") if line.rss_mib is not None]
    found = growth([(step, mib) for step, mib in lines if step > LEFT_OUT * result.steps])
    return {
        **found,
        "steps": result.steps,
        "versions": find(framework).versions,
        "measured": time.strftime("%-d %B %Y", time.gmtime((folder / "result.json").stat().st_mtime)),
    }


def growth(lines: Sequence[tuple[int, float]]) -> dict[str, float]:
    """What memory comes to, from (step, MiB): medians of the first and of the last lines, and a step's share of it."""
    count = max(1, round(SHARE * len(lines)))
    (first_step, first), (last_step, last) = (
        (statistics.median(step for step, _ in part), statistics.median(mib for _, mib in part))
        for part in (lines[:count], lines[-count:])
    )
    return {
        "first_mib": first,
        "last_mib": last,
        "least_mib": min(mib for _, mib in lines),
        "most_mib": max(mib for _, mib in lines),
        "growth_percent": 100 * (last / first - 1),
        "kib_per_step": 1024 * (last - first) / (last_step - first_step),
    }


if __name__ == "__main__":
    harness.exit_with(main)
