"""Sharding in hvdkit beside PyTorch's own and DeepSpeed's: tokens per second and memory of a GPT with 25 M parameters.

    .venv/bin/python -m benchmarks.sharding_rivals        (needs: hvdkit runtime build deepspeed)

For each stage, a round trains the same recipe by hvdkit and by each baseline that has the stage, directly after each
other in random order, two ranks of one thread each. Ratios are of one round; the page has their medians. Rounds that
are done are kept in `runs/sharding-rivals` and not run again: give `--fresh` after a change of code. Writes
sharding_rivals.json and sharding_rivals.md beside itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.sharding import ALWAYS, MODELS, RANKS, RECIPE
from hvdkit.baselines.registry import RIVALS

MODEL, STEPS, WARMUP_STEPS = "25 M", 15, 5
HVDKIT, FRAMEWORK = "hvdkit", "pytorch"
STAGES = ("optimizer", "gradients", "parameters")
LENGTH = [f"steps={STEPS}", f"warmup_steps={WARMUP_STEPS}", f"log_every={STEPS}", "schedule.warmup_epochs=0"]


def main() -> None:
    """The command line."""
    args = harness.parser(__doc__, rounds=5, keep="sharding-rivals").parse_args()
    kept, found = harness.kept(args), {}
    for number in range(1, args.rounds + 1):  # the stages take turns, so that a noisy hour hits all of them
        for stage in STAGES:
            found[stage] = harness.rounds(kept, [stage], sides(stage), number, train)[stage]
    outcome = {
        "recipe": RECIPE,
        "model": MODEL,
        "ranks": RANKS,
        "steps": STEPS - WARMUP_STEPS,
        "rounds": args.rounds,
        "rows": [row(stage, side, rounds) for stage, rounds in found.items() for side in rounds[0]],
    }
    harness.publish("sharding_rivals", outcome, args.out)


def sides(stage: str) -> list[str]:
    """hvdkit, and the baselines that have the stage."""
    return [HVDKIT, *(name for name, rival in RIVALS.items() if rival.shards and stage in rival.sharding)]


def train(stage: str, _: int, side: str, folder: Path) -> dict[str, Any]:
    """The result of one run."""
    keys = [*MODELS[MODEL][0], *ALWAYS, *LENGTH, f"sharding={stage}"]
    harness.start_ranks(str(folder), FRAMEWORK, RANKS, RECIPE, keys, rival=None if side == HVDKIT else side)
    return harness.result_of(folder)


def row(stage: str, side: str, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one side of a stage: medians, and the ratio of hvdkit's speed to its own."""
    runs = [each[side] for each in rounds]
    ratios = [each[HVDKIT]["tokens_per_second"] / each[side]["tokens_per_second"] for each in rounds]
    return {
        "stage": stage,
        "side": side,
        "version": runs[0]["framework_version"],
        "tokens_per_second": harness.median_and_range([run["tokens_per_second"] for run in runs]),
        "ratio": harness.interval(ratios),
        "state_mib": {name: size / 2**20 for name, size in runs[0]["state_bytes"].items()},
        "peak_rss_mib": statistics.median(run["peak_rss_mib"] for run in runs),
    }


if __name__ == "__main__":
    harness.exit_with(main)
