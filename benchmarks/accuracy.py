"""Validation accuracy of the digits recipe on two ranks, three seeds a framework.

    .venv/bin/python benchmarks/accuracy.py

Runs that are done are kept in `runs/accuracy` and not run again; `--fresh` starts anew. Writes accuracy.json and
accuracy.md beside itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness

SEEDS, RANKS = (1, 2, 3), 2


def main() -> None:
    """The command line."""
    keep = harness.kept(harness.parser(__doc__, keep="accuracy").parse_args())
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:

        def run(framework: str, folder: Path, seed: int = seed) -> dict[str, Any]:
            result = harness.train(framework, RANKS, "resnet20-digits", [f"seed={seed}"], folder)
            harness.say(f"{framework}, seed {seed}: {result.val_accuracy:.4f} in {result.train_s:.0f} s")
            return result.model_dump(mode="json")

        rows += harness.one_round(keep / f"seed-{seed}", harness.FRAMEWORKS, run).values()
    harness.publish("accuracy", {"runs": rows}, frameworks=harness.FRAMEWORKS, seeds=SEEDS, ranks=RANKS)


if __name__ == "__main__":
    harness.exit_with(main)
