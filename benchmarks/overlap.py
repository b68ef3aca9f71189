"""When gradients are best sent, and in pieces of which size: PyTorch on four hosts, by the link's rate.

    .venv/bin/python benchmarks/overlap.py [--mbit-per-s 20 --mbit-per-s 1000] [--rounds 3] [--side behind]

`behind` is what hvdkit does on a CPU: one group after backward. The others send gradients while backward goes on, by
Horovod's own optimizer and with what `HOROVOD_FUSION_THRESHOLD` lets go as one (`overlap_rank.py`); or send int8 and
top-k in buckets of several sizes. `compute` sends nothing. A round runs all of them directly after each other, in
random order, on the network and recipe of `network.py`; ratios are of the same round. Rounds that are done are kept
in `runs/overlap`; give `--fresh` after a change of code. Writes overlap.json and overlap.md beside itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import interval, step_ms
from hosts import Network
from network import COMPUTING, KEYS, RANKS, RECIPE, STEPS_PER_EPOCH

WARMUP, MEASURED = 4, 12
BEHIND, COMPUTE = "behind", "compute"
MIB = 2**20


@dataclass(frozen=True)
class Side:
    """What is added to the recipe and to the ranks' environment, and whether sending overlaps with backward."""

    keys: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    overlapped: bool = False


def fusion(mib: float, overlapped: bool, **environment: str) -> Side:
    """Gradients of so many MiB are sent as one."""
    return Side((), {"HOROVOD_FUSION_THRESHOLD": str(int(mib * MIB)), **environment}, overlapped)


def _bucket(method: str, mib: float) -> Side:
    return Side((f"compression={{method: {method}, bucket_mib: {mib}}}",))


SIDES = {
    COMPUTE: Side(COMPUTING.keys),
    BEHIND: Side(),
    **{
        f"overlapped, fusion {mib:g} MiB, cycle {cycle} ms": fusion(mib, True, HOROVOD_CYCLE_TIME=str(cycle))
        for mib, cycle in ((128, 1), (128, 5), (128, 25), (0.5, 5), (0.125, 5))
    },
    **{f"topk, buckets of {mib:g} MiB": _bucket("topk", mib) for mib in (0.0625, 0.25, 4.0)},
    **{f"int8, buckets of {mib * 1024:g} KiB": _bucket("int8", mib) for mib in (1 / 512, 1 / 128, 1 / 16, 1.0)},
}


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__, rounds=3, keep="overlap")
    parser.add_argument("--mbit-per-s", type=float, action="append", help="of links (default 20 and 1000)")
    parser.add_argument("--side", action="append", choices=list(SIDES), help=f"only this one, {COMPUTE} and {BEHIND}")
    args = parser.parse_args()
    rates, keep = args.mbit_per_s or [20.0, 1000.0], harness.kept(args)
    names = list(dict.fromkeys([COMPUTE, BEHIND, *(args.side or SIDES)]))
    keys = [*KEYS, f"steps={WARMUP + MEASURED}", f"warmup_steps={WARMUP}", f"log_every={STEPS_PER_EPOCH}"]
    with Network(RANKS, rates[0]) as network:

        def run(rate: str, _: int, name: str, folder: Path) -> dict[str, Any]:
            network.set_rate(float(rate))
            where = {"ranks": RANKS, "hosts": network.hosts_option(), "start": network.run}
            return train(SIDES[name], RECIPE, keys, folder, **where)

        found = harness.rounds(keep, [f"{rate:g}" for rate in rates], names, args.rounds, run)
    rows = [_row(float(rate), name, rounds) for rate, rounds in found.items() for name in names]
    harness.publish("overlap", {"rounds": args.rounds, "steps": MEASURED, "rows": rows}, args.out)


def train(side: Side, recipe: str, keys: list[str], folder: Path, **where: Any) -> dict[str, Any]:
    """Train with PyTorch as a side has it, on the ranks and hosts of `where`; raises as `harness.run` does."""
    where |= {"script": "overlap_rank.py" if side.overlapped else None, "env": {**os.environ, **side.environment}}
    job = {"framework": "pytorch", "recipe": recipe, "keys": [*keys, *side.keys, "checkpoint=null"]}
    harness.elsewhere(harness.start_ranks, out=str(folder), **job, **where)
    return harness.result_of(folder)


def _row(rate: float, name: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    times = [{side: step_ms(result) for side, result in each.items()} for each in rounds]
    return {
        "mbit_per_s": rate,
        "side": name,
        "step_ms": [each[name] for each in times],
        "over_behind": interval([each[name] / each[BEHIND] for each in times]),
        "exposed_ms": interval([each[name] - each[COMPUTE] for each in times]),
        "bytes_per_step": rounds[0][name]["bytes_per_step"],
    }


if __name__ == "__main__":
    harness.exit_with(main)
