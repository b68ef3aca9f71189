"""When gradients are best sent, and in pieces of which size: PyTorch on four hosts, by link's rate.

    .venv/bin/python benchmarks/overlap.py [--mbit-per-s 20 --mbit-per-s 1000] [--rounds 3] [--side behind]

`behind` is what hvdkit does on a CPU: one group behind backward. The others send gradients while backward goes on, by
Horovod's own optimizer and with what `HOROVOD_FUSION_THRESHOLD` lets go as one (`overlap_rank.py`); or send int8 and
top-k in buckets of several sizes. `compute` sends nothing. A round runs all of them directly after each other, in
random order, on the network and recipe of `network.py`; ratios are of the same round. Rounds that are done are kept
in `runs/overlap`; give `--fresh` after a change of code. Writes overlap.json and overlap.md beside itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import commands
from hosts import Network, Unavailable
from network import COMPUTING, RANKS, RECIPE, STEPS_PER_EPOCH, TIMEOUT_S, step_ms
from ratios import interval, told

from hvdkit.commands.plan import make_plan
from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.results.train import TrainResult, read_result

HERE = Path(__file__).resolve().parent
WARMUP, MEASURED = 4, 12
BEHIND, COMPUTE = "behind", "compute"
MIB = 2**20


@dataclass(frozen=True)
class Side:
    """What is added to the recipe and to the ranks' environment, and whether sending overlaps with backward."""

    keys: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    overlapped: bool = False


def _overlapped(fusion_mib: float, cycle_ms: float) -> Side:
    environment = {"HOROVOD_FUSION_THRESHOLD": str(int(fusion_mib * MIB)), "HOROVOD_CYCLE_TIME": f"{cycle_ms:g}"}
    return Side(environment=environment, overlapped=True)


def _bucket(method: str, mib: float) -> Side:
    return Side((f"compression={{method: {method}, bucket_mib: {mib}}}",))


SIDES = {
    COMPUTE: Side(COMPUTING.keys),
    BEHIND: Side(),
    **{
        f"overlapped, fusion {fusion:g} MiB, cycle {cycle:g} ms": _overlapped(fusion, cycle)
        for fusion, cycle in ((128, 1), (128, 5), (128, 25), (0.5, 5), (0.125, 5))
    },
    **{f"topk, buckets of {mib:g} MiB": _bucket("topk", mib) for mib in (0.0625, 0.25, 4.0)},
    **{f"int8, buckets of {mib * 1024:g} KiB": _bucket("int8", mib) for mib in (1 / 512, 1 / 128, 1 / 16, 1.0)},
}


def main() -> int:
    """The command line; returns the exit status."""
    if sys.argv[1:2] == ["--inside"]:
        return inside(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit-per-s", type=float, action="append", help="of links (default 20 and 1000)")
    parser.add_argument("--side", action="append", choices=list(SIDES), help=f"only this one, {COMPUTE} and {BEHIND}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="forget rounds that are done")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "overlap", help="where runs are kept")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {args.rounds}")
    rates, names = args.mbit_per_s or [20.0, 1000.0], [COMPUTE, BEHIND, *(args.side or SIDES)]
    names = list(dict.fromkeys(names))
    keep = args.keep.absolute()
    if args.fresh:
        shutil.rmtree(keep, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    try:
        with Network(RANKS, rates[0]) as network:
            for rate in rates:
                network.set_rate(rate)
                rounds = [_round(network, keep / f"{rate:g}" / f"{number:02d}", names) for number in range(args.rounds)]
                rows += [_row(rate, name, rounds) for name in names]
    except (Unavailable, ValueError, HvdkitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    outcome = {"command": "python benchmarks/overlap.py", "rounds": args.rounds, "rows": rows}
    outcome |= {"measured": time.strftime("%-d %B %Y", time.gmtime()), "machine": this_machine().model_dump()}
    write_atomic(HERE / "overlap.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(HERE / "overlap.md", page(outcome))
    print(page(outcome))
    return 0


def _round(network: Network, folder: Path, names: list[str]) -> dict[str, TrainResult]:
    """One round, run again where it was broken off: its sides would be hours apart."""
    places = {name: folder / f"{list(SIDES).index(name):02d}" for name in names}
    if not all((place / "result.json").exists() for place in places.values()):
        shutil.rmtree(folder, ignore_errors=True)
        order = list(names)
        random.Random(str(folder.name)).shuffle(order)
        for name in order:
            _run(network, name, places[name])
            took = step_ms(read_result(places[name] / "result.json"))
            print(
                f"{network.mbit_per_s:g} Mbit/s, round {int(folder.name) + 1}: {name}: {took:.0f} ms a step", flush=True
            )
    return {name: read_result(place / "result.json") for name, place in places.items()}


def _run(network: Network, name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    command = [sys.executable, __file__, "--inside", name, network.hosts_option(), str(folder)]
    commands.run(network.run, command, TIMEOUT_S, env={**os.environ, **SIDES[name].environment})


def inside(name: str, hosts: str, folder: str) -> int:
    """Where the hosts are known: train by this side's script, which `hvdkit train` has no option for."""
    from hvdkit import paths
    from hvdkit.commands import train
    from hvdkit.recipe import schema

    keys = [*RECIPE[1:], *SIDES[name].keys, f"steps={WARMUP + MEASURED}", f"warmup_steps={WARMUP}"]
    recipe = schema.load(
        paths.recipes() / f"{RECIPE[0]}.yaml", [*keys, f"log_every={STEPS_PER_EPOCH}", "checkpoint=null"]
    )
    plan = make_plan(recipe, "pytorch", RANKS, hosts, "direct")
    train.run(plan.by(HERE / "overlap_rank.py") if SIDES[name].overlapped else plan, Path(folder))
    return 0


def _row(rate: float, name: str, rounds: list[dict[str, TrainResult]]) -> dict[str, Any]:
    times = [{side: step_ms(result) for side, result in each.items()} for each in rounds]
    return {
        "mbit_per_s": rate,
        "side": name,
        "step_ms": [each[name] for each in times],
        "over_behind": interval([each[name] / each[BEHIND] for each in times]),
        "exposed_ms": interval([each[name] - each[COMPUTE] for each in times]),
        "bytes_per_step": rounds[0][name].bytes_per_step,
    }


def page(outcome: dict[str, Any]) -> str:
    """`overlap.md`."""
    machine = outcome["machine"]
    lines = [
        "# When gradients are sent, and in which pieces",
        "",
        f"ResNet-20, PyTorch, four hosts, {MEASURED} steps measured, {outcome['rounds']} rounds. Behind: one group "
        "behind backward, as hvdkit does on CPUs. Overlapped: by Horovod's own optimizer while backward goes on. "
        "Exposed: the step less that of the same round in which nothing is sent. Medians, 95 % bootstrap intervals.",
    ]
    for rate in dict.fromkeys(row["mbit_per_s"] for row in outcome["rows"]):
        lines += ["", f"## {rate:g} Mbit/s", "", "| | ms a step | ÷ behind | exposed, ms | bytes a step |"]
        lines += ["|:---|---:|---:|---:|---:|"]
        for row in outcome["rows"]:
            if row["mbit_per_s"] == rate:
                step, exposed, beside = interval(row["step_ms"]), row["exposed_ms"], told(row["over_behind"], 3)
                lines.append(
                    f"| {row['side']} | {step['median']:.0f} | {beside} | {exposed['median']:.0f} | "
                    f"{row['bytes_per_step'] or 0:,.0f} |"
                )
    lines += [
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}. Made by `{outcome['command']}`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
