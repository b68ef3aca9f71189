"""How many bytes are best reduced as one where the network is large and the link is memory: ResNet-50, two ranks.

    .venv/bin/python benchmarks/fusion.py [--rounds 5] [--side 'fusion 8 MiB']

`fusion N MiB` sends all gradients behind backward, as hvdkit does on a CPU, with Horovod's fusion threshold at N; with
`whole` all 102 MB are one. The overlapped ones go while backward does (`overlap_rank.py`); `ddp` is PyTorch's own. A
round runs all of them directly after each other, in random order; ratios are of the same round. Writes fusion.json and
fusion.md beside itself. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from network import step_ms
from overlap import MIB, Side
from ratios import interval, told

from hvdkit import paths
from hvdkit.commands import train
from hvdkit.commands.plan import make_plan
from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.recipe import schema
from hvdkit.results.machine import this_machine

HERE = Path(__file__).resolve().parent
NP, WARMUP, MEASURED = 2, 3, 10
KEYS = ["data.height=64", "data.width=64", "data.train_images=640", "data.val_images=32", "threads=1"]
WHOLE, DDP = "whole", "ddp"


def _fusion(mib: float, overlapped: bool = False) -> Side:
    return Side(environment={"HOROVOD_FUSION_THRESHOLD": str(int(mib * MIB))}, overlapped=overlapped)


SIDES = {
    WHOLE: _fusion(256),
    **{f"fusion {mib} MiB": _fusion(mib) for mib in (1, 4, 16, 64)},
    **{f"overlapped, fusion {mib} MiB": _fusion(mib, overlapped=True) for mib in (16, 64)},
    DDP: Side(),
}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", action="append", choices=list(SIDES), help=f"only this one, {WHOLE} and {DDP}")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for json and md (default: this script's)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {args.rounds}")
    names = list(dict.fromkeys([WHOLE, DDP, *(args.side or SIDES)]))
    rounds: list[dict[str, float]] = []
    try:
        for number in range(args.rounds):
            order = list(names)
            random.Random(number).shuffle(order)
            rounds.append({name: _timed(name) for name in order})
            print(f"round {number + 1}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in rounds[-1].items()))
    except HvdkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    outcome: dict[str, Any] = {
        "command": "python benchmarks/fusion.py",
        "rows": [
            {
                "side": name,
                "step_ms": [each[name] for each in rounds],
                "over_whole": interval([each[name] / each[WHOLE] for each in rounds]),
                "over_ddp": interval([each[name] / each[DDP] for each in rounds]),
            }
            for name in names
        ],
        "measured": time.strftime("%-d %B %Y", time.gmtime()),
        "machine": this_machine().model_dump(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out / "fusion.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(args.out / "fusion.md", page(outcome))
    print(page(outcome))
    return 0


def _timed(name: str) -> float:
    """Milliseconds a step."""
    side = SIDES[name]
    keys = [
        *KEYS,
        f"steps={WARMUP + MEASURED}",
        f"warmup_steps={WARMUP}",
        f"log_every={WARMUP + MEASURED}",
        "checkpoint=null",
    ]
    recipe = schema.load(paths.recipes() / "resnet50-synthetic.yaml", keys)
    before = dict(os.environ)
    os.environ.update(side.environment)
    try:
        plan = make_plan(recipe, "pytorch", NP, None, "direct", rival=DDP if name == DDP else None)
        with tempfile.TemporaryDirectory() as folder:
            return step_ms(train.run(plan.by(HERE / "overlap_rank.py") if side.overlapped else plan, Path(folder)))
    finally:
        os.environ.clear()
        os.environ.update(before)


def page(outcome: dict[str, Any]) -> str:
    """`fusion.md`."""
    machine = outcome["machine"]
    lines = [
        "# How many bytes are reduced as one",
        "",
        f"ResNet-50 of 64 × 64 images, PyTorch, {NP} ranks of one thread on one machine, {MEASURED} steps measured. "
        "Whole: all gradients, 102 MB, as one behind backward. Milliseconds a step, ratios of the same round; medians, "
        "95 % bootstrap intervals.",
        "",
        "| | ms a step | ÷ whole | ÷ DDP | n |",
        "|:---|---:|---:|---:|---:|",
    ]
    for row in outcome["rows"]:
        beside = [told(row[key], 3) for key in ("over_whole", "over_ddp")]
        step = interval(row["step_ms"])["median"]
        lines.append(f"| {row['side']} | {step:.0f} | {' | '.join(beside)} | {len(row['step_ms'])} |")
    made = f"Made by `{outcome['command']}`, {outcome['measured']}."
    lines += ["", f"{machine['processor']}, {machine['cores']} cores, {machine['system']}. {made}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
