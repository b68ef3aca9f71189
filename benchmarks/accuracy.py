"""Validation accuracy of the digits recipe on two ranks, three seeds a framework.

    .venv/bin/python -m benchmarks.accuracy

Runs that are done are kept in `runs/accuracy` and not run again; `--fresh` starts anew. Writes accuracy.json and
accuracy.md beside itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import harness, written

SEEDS, RANKS = 3, 2


def main() -> None:
    """The command line."""
    args = harness.parser(__doc__, rounds=SEEDS, keep="accuracy", frameworks=True).parse_args()
    frameworks = args.framework or harness.FRAMEWORKS
    rounds = harness.rounds(harness.kept(args), ["seeds"], frameworks, args.rounds, run)["seeds"]
    rows = [one[name] for one in rounds for name in frameworks]
    seeds = [number + 1 for number in range(args.rounds)]
    accuracies = {
        name: harness.median_and_range([row["val_accuracy"] for row in rows if row["framework"] == name])
        for name in frameworks
    }
    outcome = {"accuracies": accuracies, "ranks": RANKS, "seeds": seeds, "frameworks": frameworks, "runs": rows}
    written.publish("accuracy", outcome, args.out)


def run(_: str, number: int, framework: str, folder: Path) -> dict[str, Any]:
    """Training with a seed."""
    return harness.train(framework, RANKS, "resnet20-digits", [f"seed={number + 1}"], folder)


if __name__ == "__main__":
    harness.exit_with(main)
