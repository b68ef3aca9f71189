"""By which way gradients are best added up on two hosts of two ranks, fast inside and slow between: ways.json.

    .venv/bin/python benchmarks/ways.py [--mbit-per-s 50 --mbit-per-s 1000] [--rounds 8] [--framework pytorch]

`allreduce: ring`, `hierarchical` and `central` take turns in one process a rank (`ways_rank.py`): a few steps each in
random order, round after round, and with them `compute`, the same ranks at the same time without a word between them
(Local SGD that never meets). Ratios are of the same round. ResNet-20 on MNIST's 5,000 images, one thread a rank; the
network is that of `hosts.py`, whose loopbacks know no limit. What crosses is counted at both hosts' interfaces. Needs a
quiet machine and network namespaces; two minutes a rate. Writes ways.json and ways.md beside itself.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import commands
from hosts import Network, Unavailable
from ratios import interval, told

from hvdkit.commands.plan import launch, make_plan
from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.recipe import registry, schema
from hvdkit.results.machine import this_machine
from hvdkit.tasks.resnet import architecture, parameter_count

HERE = Path(__file__).resolve().parent
HOSTS, SLOTS = 2, 2
RECIPE, KEYS = "resnet20-digits", ["data={name: mnist5k}", "batch_size=16", "threads=1"]
GRADIENT_BYTES = 4 * parameter_count(architecture("resnet20", 10))
RING, COMPUTE = "ring", "compute"
WAYS = {
    RING: ["allreduce=ring"],
    "hierarchical": ["allreduce=hierarchical"],
    "central": ["allreduce=central"],
    COMPUTE: ["sync={every: 1000000}"],
}
WARMUP, MEASURED = 1, 6  # steps of a turn
# Ranks that never wait for each other share two cores unevenly for a while.
MEASURED_COMPUTE = 16
RATES = [50.0, 100.0, 1000.0]
TIMEOUT_S = 600.0


def measured(way: str) -> int:
    """How many steps of a turn count."""
    return MEASURED_COMPUTE if way == COMPUTE else MEASURED


def measure(rate: float, rounds: int, framework: str) -> dict[str, Any]:
    """What the ranks have found at a link's rate. Raises RunError, Unavailable."""
    order = random.Random(f"{framework} {rate}")
    with tempfile.TemporaryDirectory() as folder, Network(HOSTS, rate) as network:
        plan, found = Path(folder) / "plan.json", Path(folder) / "found.json"
        asked = {
            "recipe": str(registry.locate(Path(RECIPE))),
            "keys": KEYS,
            "sides": {way: {"keys": keys, "warmup": WARMUP, "measured": measured(way)} for way, keys in WAYS.items()},
            "rounds": [order.sample(list(WAYS), len(WAYS)) for _ in range(rounds)],
            "out": str(found),
        }
        write_atomic(plan, json.dumps(asked) + "\n")
        command = [sys.executable, __file__, "--inside", framework, network.hosts_option(SLOTS), str(plan)]
        commands.run(network.run, command, TIMEOUT_S)
        return dict(json.loads(found.read_text()))


def inside(framework: str, hosts: str, plan: Path) -> None:
    """Start the ranks that take turns, where the hosts are known. Raises as `commands.plan.launch` does."""
    # Of all ways it is the one that Horovod's environment must be made ready for.
    recipe = schema.load(registry.locate(Path(RECIPE)), [*KEYS, *WAYS["hierarchical"]])
    ranks = make_plan(recipe, framework, HOSTS * SLOTS, hosts, "direct").by(HERE / "ways_rank.py")
    launch(ranks, plan, [framework], plan.with_suffix(".logs"))


def rows(rate: float, found: dict[str, Any]) -> list[dict[str, Any]]:
    """One a way. A turn's step is the mean of its steps on the rank that took longest."""
    rounds = found["rounds"]
    steps = [{way: _step_ms(each["seconds"][way]) for way in WAYS} for each in rounds]
    made = []
    for way in WAYS:
        crossed = [
            {host: sent / (WARMUP + measured(way)) for host, sent in each["sent_bytes"][way].items()} for each in rounds
        ]
        row: dict[str, Any] = {
            "mbit_per_s": rate,
            "way": way,
            "step_ms": interval([each[way] for each in steps]),
            "as_fast_as_ring": interval([each[RING] / each[way] for each in steps]),
            "sent_bytes_per_step": {host: interval([each[host] for each in crossed])["median"] for host in crossed[0]},
        }
        if way != COMPUTE:
            exposed = [(each[RING] - each[COMPUTE]) / (each[way] - each[COMPUTE]) for each in steps]
            row["communication_ms"] = interval([each[way] - each[COMPUTE] for each in steps])
            row["communication_as_fast_as_ring"] = interval(exposed)
        made.append(row)
    return made


def _step_ms(ranks: list[list[float]]) -> float:
    return 1e3 * max(sum(steps) / len(steps) for steps in ranks)


def page(outcome: dict[str, Any]) -> str:
    """`ways.md`."""
    machine, versions = outcome["machine"], outcome["versions"]
    lines = [
        "# By which way gradients are added up",
        "",
        f"ResNet-20, {outcome['framework']} {versions['framework']}, Horovod {versions['horovod']}; two hosts of two "
        f"ranks, one thread a rank, {GRADIENT_BYTES:,} bytes of gradients. Communication is the step less that of the "
        "same round in which nothing is sent; what a host sends over its link for a step is counted at its interface, "
        f"headers and acknowledgements too. {outcome['rounds']} rounds of {MEASURED} steps of each way, in random "
        "order; ratios are of the same round; medians with 95 % bootstrap intervals.",
    ]
    for rate in dict.fromkeys(row["mbit_per_s"] for row in outcome["rows"]):
        lines += ["", f"## {rate:g} Mbit/s between the hosts", ""]
        lines += ["| | ms a step | communication, ms | ring's ÷ this | ring's step ÷ this | h1 sends | h2 sends |"]
        lines += ["|:---|---:|---:|---:|---:|---:|---:|"]
        for row in outcome["rows"]:
            if row["mbit_per_s"] != rate:
                continue
            alone = row["way"] == COMPUTE
            cells = [
                "nothing is sent" if alone else row["way"],
                told(row["step_ms"], 0),
                "" if alone else told(row["communication_ms"], 0),
                "" if alone else told(row["communication_as_fast_as_ring"], 2),
                told(row["as_fast_as_ring"], 2),
                *(f"{sent / GRADIENT_BYTES:.2f} vectors" for sent in row["sent_bytes_per_step"].values()),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, {outcome['measured']}; others used at "
        f"most {outcome['load'] or 0:.0%} of it. Made by `{outcome['command']}`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line; returns the exit status."""
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit-per-s", type=float, action="append", help="between the hosts (default 50, 100, 1000)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--framework", default="pytorch")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for json and md (default: this script's)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {args.rounds}")
    made: list[dict[str, Any]] = []
    loads, versions = [], {}
    try:
        for rate in args.mbit_per_s or RATES:
            found = measure(rate, args.rounds, args.framework)
            made += rows(rate, found)
            loads.append(found["load"] or 0.0)
            versions = found["versions"]
            steps = ", ".join(f"{row['way']} {row['step_ms']['median']:.0f} ms" for row in made[-len(WAYS) :])
            print(f"{rate:g} Mbit/s: {steps}", flush=True)
    except (Unavailable, ValueError, HvdkitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    outcome = {
        "command": "python benchmarks/ways.py",
        "framework": args.framework,
        "versions": versions,
        "rounds": args.rounds,
        "steps_a_turn": MEASURED,
        "gradient_bytes": GRADIENT_BYTES,
        "rows": made,
        "load": max(loads),
        "measured": time.strftime("%-d %B %Y", time.gmtime()),
        "machine": this_machine().model_dump(),
    }
    write_atomic(args.out / "ways.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(args.out / "ways.md", page(outcome))
    print(page(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
