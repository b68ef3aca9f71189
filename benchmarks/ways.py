"""By which way gradients are best added up on two hosts of two ranks, fast inside and slow between: ways.json.

    .venv/bin/python -m benchmarks.ways [--mbit-per-s 50 --mbit-per-s 1000] [--rounds 8] [--framework pytorch]

`allreduce: ring`, `hierarchical` and `central` take turns in one process a rank (`turns_rank.py`): a few steps each in
random order, round after round, and with them `compute`, the same ranks at the same time that send nothing (Local SGD
that never synchronizes). Ratios are of the same round. ResNet-20 on MNIST's 5,000 images, one thread a rank; the
network is that of `hvdkit hosts`, whose loopbacks have no limit. What crosses is counted at both hosts' interfaces.
Needs a quiet machine and network namespaces; two minutes a rate. Writes ways.json and ways.md beside itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness, in_turns, written
from benchmarks.harness import interval
from hvdkit.launch.namespaces import Network
from hvdkit.tasks.resnet import architecture
from hvdkit.tasks.task import parameter_count

HOSTS, SLOTS = 2, 2
KEYS = ["data={name: mnist5k}", "batch_size=16", "threads=1"]
GRADIENT_BYTES = 4 * parameter_count(architecture("resnet20", 10))
RING, COMPUTE, WARMUP, MEASURED = "ring", "compute", 1, 6  # steps of a turn
WAYS: dict[str, in_turns.Side] = {
    way: ([f"allreduce={way}"], WARMUP, MEASURED) for way in (RING, "hierarchical", "central")
}
# Ranks that never wait for each other share two cores unevenly for a while: more steps.
WAYS[COMPUTE] = (["sync={every: 1000000}", "allreduce=ring"], WARMUP, 16)


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__, rounds=8)
    parser.add_argument("--mbit-per-s", type=float, action="append", help="between the hosts (default 50, 100, 1000)")
    parser.add_argument("--framework", default="pytorch", choices=harness.FRAMEWORKS)
    args = parser.parse_args()
    rates = args.mbit_per_s or [50.0, 100.0, 1000.0]
    found = {rate: measure(rate, args.rounds, args.framework) for rate in rates}
    made = [row for rate, one in found.items() for row in rows(rate, one)]
    outcome = {"framework": args.framework, "versions": found[rates[0]]["versions"], "rounds": args.rounds}
    outcome |= {"steps_a_turn": MEASURED, "load": max(one["load"] for one in found.values())}
    outcome |= {"gradient_bytes": GRADIENT_BYTES, "rows": made}
    written.publish("ways", outcome, args.out)


def measure(rate: float, rounds: int, framework: str) -> dict[str, Any]:
    """What the ranks have measured at a link's rate. Raises RunError, Unavailable."""
    # Of all ways, `hierarchical` is the one that Horovod's environment must be set up for.
    keys = [*KEYS, "allreduce=hierarchical"]
    with tempfile.TemporaryDirectory() as folder, Network(HOSTS, rate) as network:
        return in_turns.take_turns(network, SLOTS, framework, keys, WAYS, list(WAYS), rounds, Path(folder))


def rows(rate: float, found: dict[str, Any]) -> list[dict[str, Any]]:
    """One a way."""
    steps = in_turns.turn_ms(found["rounds"])
    sent = [
        {way: by_host for (way, _), by_host in zip(turns, counted, strict=True)}
        for turns, counted in zip(found["rounds"], found["sent_bytes"], strict=True)
    ]
    made = []
    for way, (_, warmup, measured) in WAYS.items():
        a_turn = warmup + measured
        row: dict[str, Any] = {
            "mbit_per_s": rate,
            "way": way,
            "step_ms": interval([each[way] for each in steps]),
            "as_fast_as_ring": interval([each[RING] / each[way] for each in steps]),
            "sent_bytes_per_step": {
                host: interval([each[way][host] / a_turn for each in sent])["median"] for host in sent[0][way]
            },
        }
        if way != COMPUTE:
            exposed = [(each[RING] - each[COMPUTE]) / (each[way] - each[COMPUTE]) for each in steps]
            row["communication_ms"] = interval([each[way] - each[COMPUTE] for each in steps])
            row["communication_as_fast_as_ring"] = interval(exposed)
        made.append(row)
    return made


if __name__ == "__main__":
    harness.exit_with(main)
