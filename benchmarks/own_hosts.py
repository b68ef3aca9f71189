"""What steps take on hosts with slow links, and what is needed to predict it: own-hosts.json, for `make validate`.

    make bench-hosts      (or: .venv/bin/python benchmarks/own_hosts.py --limit 450, again and again until it is done)

Four hosts with slow links between them (`hosts.py`), a rank of one thread on each: ResNet-20 on MNIST's 5,000 images.
Three kinds of runs, each kept in `runs/own-hosts` and not done again:

- `hvdkit profile` of each method at 2 ranks on this machine, without any slow link;
- `hvdkit bench`, allreduce and allgather, over the slow links;
- turns: all methods in one process a rank, a few steps each in random order, round after round, and with them
  `compute`, the same ranks at the same time that send nothing (Local SGD that never synchronizes).

Predictions start from the first two and are compared with the third, as ratios to `compute` of the same round: four
ranks share this machine's cores, so what they compute is not what two do. PyTorch at three rates, the other frameworks
at one. Needs a quiet machine and network namespaces. Writes own-hosts.json and own-hosts-profiles.json beside itself,
with the frameworks of which all is there.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
from harness import FRAMEWORKS, HERE
from hosts import Network

from hvdkit.files import write_atomic
from hvdkit.results import profile as profiles
from hvdkit.results.bench import Bench
from hvdkit.results.machine import this_machine
from hvdkit.simulator import cluster as clusters

TABLE, PROFILES = HERE / "own-hosts.json", HERE / "own-hosts-profiles.json"
RATE, OTHER_RATES = 50.0, (20.0, 100.0)  # Mbit/s: of all frameworks, and of PyTorch beside it
RANKS, ROUNDS = 4, 5
RECIPE, KEYS = "resnet20-digits", ["data={name: mnist5k}", "batch_size=25", "threads=1"]
COMPUTE, DENSE = "compute", "dense"
# What is added to the recipe, and how many steps of a turn are left out and measured: of Local SGD whole rounds.
METHODS: dict[str, tuple[list[str], int, int]] = {
    DENSE: ([], 1, 8),
    "fp16": (["compression=fp16"], 1, 8),
    "topk": (["compression={method: topk, ratio: 0.01}"], 1, 8),
    "hierarchical": (["allreduce=hierarchical"], 1, 8),
    "local4": (["sync={every: 4}"], 4, 8),
}
SIDES = METHODS | {COMPUTE: (["sync={every: 1000000}"], 1, 8)}
TURNS = [*METHODS, *[COMPUTE] * 3]  # of a round: every ratio depends on `compute`
KINDS, OPERATIONS = ("profile", "bench", "turns"), ("allreduce", "allgather")
TIMEOUT_S = 420.0


@dataclass(frozen=True)
class Piece:
    """One run: the file that it leaves, and how it is made."""

    name: str
    leaves: Path
    make: Callable[[], None]


class Runs:
    """All runs, kept in a folder."""

    def __init__(self, keep: Path) -> None:
        self.keep = keep

    def pieces(self, kinds: list[str], frameworks: list[str]) -> Iterator[Piece]:
        """Those of some kinds and frameworks, in order."""
        for framework in frameworks:
            for method in METHODS if "profile" in kinds else ():
                make = partial(self._profile, framework, method)
                yield Piece(f"profile of {framework}, {method}", self.profile(framework, method), make)
            for rate in self.rates(framework):
                for operation in OPERATIONS if "bench" in kinds else ():
                    leaves = self.bench(framework, rate, operation) / "cluster.yaml"
                    make = partial(self._bench, framework, rate, operation)
                    yield Piece(f"{operation} of {framework} at {rate:g} Mbit/s", leaves, make)
                if "turns" in kinds:
                    make = partial(self._turns, framework, rate)
                    yield Piece(f"turns of {framework} at {rate:g} Mbit/s", self.turns(framework, rate), make)

    def rates(self, framework: str) -> list[float]:
        """At which a framework is measured."""
        return sorted([RATE, *OTHER_RATES]) if framework == FRAMEWORKS[0] else [RATE]

    def whole(self) -> list[str]:
        """The frameworks of which nothing is left to do."""
        return [name for name in FRAMEWORKS if all(piece.leaves.exists() for piece in self.pieces([*KINDS], [name]))]

    def profile(self, framework: str, method: str) -> Path:
        """The file that it is kept in."""
        return self.keep / "profiles" / framework / method / "profile.json"

    def bench(self, framework: str, rate: float, operation: str) -> Path:
        """The folder that it is kept in."""
        return self.keep / "bench" / framework / f"{rate:g}" / operation

    def turns(self, framework: str, rate: float) -> Path:
        """The file that they are kept in."""
        return self.keep / "turns" / framework / f"{rate:g}" / "found.json"

    def _profile(self, framework: str, method: str) -> None:
        options = ["--framework", framework, "-np", "2", "--steps", "16", "--overwrite"]
        options += ["--out", str(self.profile(framework, method).parent)]
        harness.hvdkit(["profile", RECIPE, *options, *KEYS, *METHODS[method][0], "warmup_steps=4"], TIMEOUT_S)

    def _bench(self, framework: str, rate: float, operation: str) -> None:
        first = operation == OPERATIONS[0]
        most = 2_200_000 if first else 300_000  # an allgather's size is what comes out of it
        options = ["--framework", framework, "-np", str(RANKS), "--link-mbit-per-s", f"{rate:g}", "--seconds", "0.7"]
        options += ["--min-bytes", "64", "--max-bytes", str(most), "--factor", "2.83", "--overwrite"]
        options += ["--out", str(self.bench(framework, rate, operation))]
        options += [] if first else ["--add-to", str(self.bench(framework, rate, OPERATIONS[0]) / "cluster.yaml")]
        with Network(RANKS, rate) as network:
            harness.hvdkit(["bench", operation, *options, "-H", network.hosts_option()], TIMEOUT_S, network.run)

    def _turns(self, framework: str, rate: float) -> None:
        order = random.Random(f"{framework} {rate}")
        rounds = [order.sample(TURNS, len(TURNS)) for _ in range(ROUNDS)]
        sides = {
            name: {"keys": keys, "warmup": warmup, "measured": steps} for name, (keys, warmup, steps) in SIDES.items()
        }
        with Network(RANKS, rate) as network:
            harness.take_turns(network, 1, framework, RECIPE, KEYS, sides, rounds, self.turns(framework, rate).parent)


def table(runs: Runs) -> dict[str, Any]:
    """What was measured over the slow links, as own-hosts.json holds it."""
    links, measured = [], []
    versions: dict[str, str] = {}
    for framework in runs.whole():
        for rate in runs.rates(framework):
            points = {operation: _points(runs.bench(framework, rate, operation)) for operation in OPERATIONS}
            cluster = clusters.load(runs.bench(framework, rate, "allgather") / "cluster.yaml")
            where = {"framework": framework, "mbit_per_s": rate}
            links.append(where | {"cluster": cluster.model_dump(exclude_defaults=True), "points": points})
            found = json.loads(runs.turns(framework, rate).read_text())
            versions[framework] = found["versions"]["framework"]
            measured.append(where | {"load": found["load"], "step_ms": _by_round(found["rounds"])})
    return {
        "command": "make bench-hosts",
        "measured": time.strftime("%-d %B %Y", time.gmtime()),
        "machine": this_machine().model_dump(),
        "versions": versions,
        "setting": {"recipe": RECIPE, "keys": KEYS, "hosts": RANKS, "rounds": ROUNDS},
        "methods": {name: {"keys": keys, "steps": steps} for name, (keys, _, steps) in SIDES.items()},
        "turns": measured,
        "links": links,
    }


def shortened(runs: Runs) -> dict[str, Any]:
    """The profiles: dense ones in full, of each other method what it changes."""
    found: dict[str, Any] = {}
    for framework in runs.whole():
        dense = profiles.load(runs.profile(framework, DENSE)).model_dump(mode="json")
        others = {name: profiles.load(runs.profile(framework, name)) for name in METHODS if name != DENSE}
        keep = {"settings", "compression", "step"}
        found[framework] = {
            "dense": dense,
            "changes": {name: other.model_dump(mode="json", include=keep) for name, other in others.items()},
        }
    return found


def _points(folder: Path) -> list[tuple[int, float]]:
    """(bytes that a rank puts in, median µs) of a bench."""
    bench = Bench.model_validate_json((folder / "bench.json").read_bytes())
    share = bench.np if bench.collective == "allgather" else 1
    return [(row.size_bytes // share, row.p50_us) for row in bench.rows]


def _by_round(rounds: list[list[tuple[str, list[list[float]]]]]) -> dict[str, list[float]]:
    """Milliseconds a step of each method by round: a mean over each turn's steps, of the rank that took longest."""
    return {
        name: [
            round(1e3 * fmean(max(map(fmean, ranks)) for label, ranks in turns if label == name), 3) for turns in rounds
        ]
        for name in SIDES
    }


def main() -> int:
    """The command line; returns the exit status: 1 while something is left to do."""
    parser = harness.parser(__doc__, keep="own-hosts", frameworks=True)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these")
    parser.add_argument("--limit", type=float, default=1e9, help="begin nothing after so many seconds")
    args = parser.parse_args()
    began, runs = time.monotonic(), Runs(harness.kept(args))
    for piece in runs.pieces(args.kind or [*KINDS], args.framework or [*FRAMEWORKS]):
        if piece.leaves.exists():
            continue
        if time.monotonic() - began > args.limit:
            print(f"left to do: {piece.name} and what comes after it")
            break
        piece.leaves.parent.mkdir(parents=True, exist_ok=True)
        piece.make()
        harness.say(piece.name)
    if not runs.whole():
        return 1
    write_atomic(TABLE, json.dumps(table(runs), indent=1) + "\n")
    write_atomic(PROFILES, json.dumps(shortened(runs), separators=(",", ":")) + "\n")
    print(f"written to {TABLE.name} and {PROFILES.name}: {', '.join(runs.whole())}; now `make validate`")
    return 0 if len(runs.whole()) == len(FRAMEWORKS) else 1


if __name__ == "__main__":
    harness.exit_with(main)
