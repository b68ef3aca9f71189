"""What hvdkit costs over Horovod by hand: images per second and peak memory of both, side by side.

    make bench        (or: .venv/bin/python -m benchmarks.cost --rounds 7 --framework pytorch)

A round runs `plain/resnet_<framework>.py` and hvdkit's recipe directly after each other, in random order, on two
ranks of one thread each, through the same launcher and environment, and gives one ratio of each figure. A machine
that others use too slows both sides of a round alike, so ratios are reported and no absolute figures. Rounds that are
done are kept in `runs/cost` and not run again: give `--fresh` after a change of code. Writes cost.json and cost.md
beside itself; exit status 1 if a limit is missed and the interval leaves no doubt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import harness
from hvdkit import paths

SIDES = ("plain", "hvdkit")
RANKS, STEPS, WARMUP_STEPS, EPOCHS = 2, 70, 15, 4  # 22 steps an epoch: three whole ones and the start of a fourth
SPEED_MARK, MEMORY_MARK = 0.98, 1.05


def main() -> int:
    """The command line; returns the exit status."""
    args = harness.parser(__doc__, rounds=7, keep="cost", frameworks=True).parse_args()
    pairs = harness.rounds(harness.kept(args), args.framework or harness.FRAMEWORKS, SIDES, args.rounds, run)
    outcome: dict[str, Any] = {
        "marks": {"speed_at_least": SPEED_MARK, "memory_at_most": MEMORY_MARK},
        "ranks": RANKS,
        "threads": 1,
        "steps": STEPS,
        "warmup_steps": WARMUP_STEPS,
        "frameworks": {framework: summary(found) for framework, found in pairs.items()},
    }
    harness.publish("cost", outcome, args.out)
    return 1 if any(one["missed"] for one in outcome["frameworks"].values()) else 0


def run(framework: str, _: int, side: str, folder: Path) -> dict[str, Any]:
    """The result of one run."""
    length = {"epochs": EPOCHS, "steps": STEPS, "warmup_steps": WARMUP_STEPS}
    if side == "plain":
        options = {name.replace("_", "-"): value for name, value in length.items()}
        return harness.by_hand(framework, "resnet", RANKS, folder, options)
    arguments = [str(paths.script(framework)), str(paths.recipes() / "resnet20-digits.yaml"), "--out", str(folder)]
    arguments += ["threads=1", *(f"{name}={value}" for name, value in length.items())]
    harness.start_directly(framework, arguments, RANKS, folder)
    return dict(json.loads((folder / "result.json").read_text()))


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """hvdkit ÷ plain of a framework, and which limits it misses even at the better end of its interval."""
    speed, memory = (
        harness.interval([pair["hvdkit"][key] / pair["plain"][key] for pair in pairs])
        for key in ("images_per_second", "peak_rss_mib")
    )
    missed = ["speed"] if speed["high"] < SPEED_MARK else []
    missed += ["memory"] if memory["low"] > MEMORY_MARK else []
    versions = {key: pairs[0]["hvdkit"][key] for key in ("framework_version", "horovod_version", "hvdkit_version")}
    return {"speed": speed, "memory": memory, "missed": missed, "rounds": len(pairs), **versions}


if __name__ == "__main__":
    harness.exit_with(main)
