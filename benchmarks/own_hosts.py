"""What steps take on hosts with starved links, and what is needed to foresee it: own-hosts.json, for `make validate`.

    make bench-hosts      (or: .venv/bin/python benchmarks/own_hosts.py --limit 450, again and again until it is done)

Four hosts with slow links between them (`hosts.py`), a rank of one thread on each: ResNet-20 on MNIST's 5,000 images.
Three kinds of runs, each kept in `runs/own-hosts` and not done again:

- `hvdkit profile` of each method at 2 ranks on this machine, without any slow link;
- `hvdkit bench`, allreduce and allgather, over the starved links;
- turns: all methods in one process a rank, a few steps each in random order, round after round, and with them
  `compute`, the same ranks at the same time without a word between them (Local SGD that never meets).

The first two are what predictions start from, the third is what they are held against, as ratios to `compute` of the
same round: four ranks share this machine's cores, so what they compute is not what two do. PyTorch at three rates, the
other frameworks at one. Needs a quiet machine and network namespaces. Writes own-hosts.json and own-hosts-profiles.json
beside itself, with the frameworks of which all is there.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import commands
from hosts import Network, Unavailable

from hvdkit.commands.plan import launch, make_plan
from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.recipe import registry, schema
from hvdkit.results import profile as profiles
from hvdkit.results.bench import Bench
from hvdkit.results.machine import this_machine
from hvdkit.simulator import cluster as clusters

HERE = Path(__file__).resolve().parent
TABLE, PROFILES = HERE / "own-hosts.json", HERE / "own-hosts-profiles.json"
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
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
TURNS = [*METHODS, *[COMPUTE] * 3]  # of a round: every ratio hangs on `compute`
TIMEOUT_S = 420.0


@dataclass(frozen=True)
class Piece:
    """One run: what it leaves, and how it is made."""

    name: str
    leaves: Path
    make: Callable[[], None]


class Runs:
    """All runs, kept in a folder."""

    def __init__(self, keep: Path) -> None:
        self.keep = keep

    def pieces(self, names: list[str], frameworks: list[str]) -> Iterator[Piece]:
        """Those of some kinds and frameworks, in order."""
        for framework in frameworks:
            for method in METHODS if "profile" in names else ():
                leaves = self.profile(framework, method)
                yield Piece(f"profile of {framework}, {method}", leaves, partial(self._profile, framework, method))
            for rate in self.rates(framework):
                for operation in ("allreduce", "allgather") if "bench" in names else ():
                    leaves = self.bench(framework, rate, operation) / "cluster.yaml"
                    make = partial(self._bench, framework, rate, operation)
                    yield Piece(f"{operation} of {framework} at {rate:g} Mbit/s", leaves, make)
                if "turns" in names:
                    leaves = self.turns(framework, rate)
                    make = partial(self._turns, framework, rate)
                    yield Piece(f"turns of {framework} at {rate:g} Mbit/s", leaves, make)

    def rates(self, framework: str) -> list[float]:
        """At which a framework is measured."""
        return sorted([RATE, *OTHER_RATES]) if framework == FRAMEWORKS[0] else [RATE]

    def whole(self) -> list[str]:
        """The frameworks of which nothing is left to do."""
        kinds = ["profile", "bench", "turns"]
        return [name for name in FRAMEWORKS if all(piece.leaves.exists() for piece in self.pieces(kinds, [name]))]

    def profile(self, framework: str, method: str) -> Path:
        """Where it is kept."""
        return self.keep / "profiles" / framework / method / "profile.json"

    def bench(self, framework: str, rate: float, operation: str) -> Path:
        """The folder that it is kept in."""
        return self.keep / "bench" / framework / f"{rate:g}" / operation

    def turns(self, framework: str, rate: float) -> Path:
        """Where they are kept."""
        return self.keep / "turns" / framework / f"{rate:g}.json"

    def _profile(self, framework: str, method: str) -> None:
        keys = [*KEYS, *METHODS[method][0], "warmup_steps=4"]
        options = ["-np", "2", "--steps", "16", "--out", str(self.profile(framework, method).parent), "--overwrite"]
        arguments = ["profile", RECIPE, "--framework", framework, *options, *keys]
        commands.hvdkit(subprocess.run, arguments, TIMEOUT_S)

    def _bench(self, framework: str, rate: float, operation: str) -> None:
        known = self.bench(framework, rate, "allreduce") / "cluster.yaml"
        more = ["--add-to", str(known)] if operation != "allreduce" else []
        # an allgather's size is what comes out of it
        most = 2_200_000 if operation == "allreduce" else 300_000
        with Network(RANKS, rate) as network:
            arguments = [
                "bench", operation, "--framework", framework, "-np", str(RANKS), "-H", network.hosts_option(),
                "--min-bytes", "64", "--max-bytes", str(most), "--factor", "2.83", "--seconds", "0.7",
                "--link-mbit-per-s", f"{rate:g}", "--overwrite",
                "--out", str(self.bench(framework, rate, operation)), *more,
            ]  # fmt: skip
            commands.hvdkit(network.run, arguments, TIMEOUT_S)

    def _turns(self, framework: str, rate: float) -> None:
        leaves = self.turns(framework, rate)
        leaves.parent.mkdir(parents=True, exist_ok=True)
        order = random.Random(f"{framework} {rate}")
        plan = {
            "recipe": str(registry.locate(Path(RECIPE))),
            "keys": KEYS,
            "sides": {
                name: {"keys": keys, "warmup": warmup, "measured": measured}
                for name, (keys, warmup, measured) in SIDES.items()
            },
            "rounds": [order.sample(TURNS, len(TURNS)) for _ in range(ROUNDS)],
            "out": str(leaves.with_suffix(".found")),
        }
        asked = leaves.with_suffix(".plan")
        write_atomic(asked, json.dumps(plan) + "\n")
        with Network(RANKS, rate) as network:
            command = [sys.executable, str(HERE / "own_hosts.py"), "--inside", framework, network.hosts_option()]
            commands.run(network.run, [*command, str(asked)], TIMEOUT_S)
        leaves.with_suffix(".found").rename(leaves)


def inside(framework: str, hosts: str, plan: Path) -> None:
    """Start the ranks that take turns, where the hosts are known. Raises as `commands.plan.launch` does."""
    recipe = schema.load(registry.locate(Path(RECIPE)), KEYS)
    ranks = make_plan(recipe, framework, RANKS, hosts, "direct").by(HERE / "own_hosts_rank.py")
    launch(ranks, plan, [framework], plan.with_suffix(".logs"))


def table(runs: Runs) -> dict[str, Any]:
    """What was measured over the starved links, as own-hosts.json holds it."""
    links, measured = [], []
    versions: dict[str, str] = {}
    for framework in runs.whole():
        for rate in runs.rates(framework):
            points = {
                operation: _points(runs.bench(framework, rate, operation)) for operation in ("allreduce", "allgather")
            }
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", nargs=3, metavar=("FRAMEWORK", "HOSTS", "PLAN"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", action="append", choices=["profile", "bench", "turns"], help="only these")
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only these")
    parser.add_argument("--limit", type=float, default=1e9, help="begin nothing after so many seconds")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "own-hosts", help="where runs are kept")
    args = parser.parse_args()
    began, runs = time.monotonic(), Runs(args.keep.absolute())
    try:
        if args.inside:
            inside(args.inside[0], args.inside[1], Path(args.inside[2]))
            return 0
        kinds = args.kind or ["profile", "bench", "turns"]
        for piece in runs.pieces(kinds, args.framework or list(FRAMEWORKS)):
            if piece.leaves.exists():
                continue
            if time.monotonic() - began > args.limit:
                print(f"left to do: {piece.name} and what comes behind it")
                break
            piece.leaves.parent.mkdir(parents=True, exist_ok=True)
            piece.make()
            print(f"[{time.monotonic() - began:4.0f} s] {piece.name}", flush=True)
        if not runs.whole():
            return 1
        write_atomic(TABLE, json.dumps(table(runs), indent=1) + "\n")
        write_atomic(PROFILES, json.dumps(shortened(runs), separators=(",", ":")) + "\n")
    except (Unavailable, HvdkitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    print(f"written to {TABLE.name} and {PROFILES.name}: {', '.join(runs.whole())}; now `make validate`")
    return 0 if len(runs.whole()) == len(FRAMEWORKS) else 1


if __name__ == "__main__":
    sys.exit(main())
