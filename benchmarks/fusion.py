"""How many bytes are best reduced as one where the model is large and the link is memory: ResNet-50, two ranks.

    .venv/bin/python benchmarks/fusion.py [--rounds 5] [--side 'fusion 8 MiB']

`fusion N MiB` sends all gradients after backward, as hvdkit does on a CPU, with Horovod's fusion threshold at N; with
`whole` all 102 MB are one. The overlapped ones are sent while backward goes on (`overlap_rank.py`); `ddp` is PyTorch's
own. A round runs all of them directly after each other, in random order; ratios are of the same round. Rounds that are
done are kept in `runs/fusion`; give `--fresh` after a change of code. Writes fusion.json and fusion.md beside itself.
Needs a quiet machine.
"""

from __future__ import annotations

from pathlib import Path

import harness
import overlap
from harness import interval

RANKS, WARMUP, MEASURED = 2, 3, 10
KEYS = ["data.height=64", "data.width=64", "data.train_images=640", "data.val_images=32", "threads=1"]
KEYS += [f"steps={WARMUP + MEASURED}", f"warmup_steps={WARMUP}", f"log_every={WARMUP + MEASURED}"]
WHOLE, DDP = "whole", "ddp"
SIDES = {
    WHOLE: overlap.fusion(256, False),
    **{f"fusion {mib} MiB": overlap.fusion(mib, False) for mib in (1, 4, 16, 64)},
    **{f"overlapped, fusion {mib} MiB": overlap.fusion(mib, True) for mib in (16, 64)},
    DDP: overlap.Side(),
}


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__, rounds=5, keep="fusion")
    parser.add_argument("--side", action="append", choices=list(SIDES), help=f"only this one, {WHOLE} and {DDP}")
    args = parser.parse_args()
    names = list(dict.fromkeys([WHOLE, DDP, *(args.side or SIDES)]))
    rounds = harness.rounds(harness.kept(args), ["steps"], names, args.rounds, _timed)["steps"]
    rows = [
        {
            "side": name,
            "step_ms": [each[name] for each in rounds],
            "over_whole": interval([each[name] / each[WHOLE] for each in rounds]),
            "over_ddp": interval([each[name] / each[DDP] for each in rounds]),
        }
        for name in names
    ]
    harness.publish("fusion", {"ranks": RANKS, "steps": MEASURED, "rows": rows}, args.out)


def _timed(_: str, number: int, name: str, folder: Path) -> float:
    """Milliseconds a step."""
    where = {"ranks": RANKS, "rival": DDP if name == DDP else None}
    return harness.step_ms(overlap.train(SIDES[name], "resnet50-synthetic", KEYS, folder, **where))


if __name__ == "__main__":
    harness.exit_with(main)
