"""What steps take on hosts with slow links, and what is needed to predict it: own-hosts.json.gz, for `make validate`.

    make bench-hosts      (or: .venv/bin/python -m benchmarks.own_hosts [--framework pytorch])

Four hosts with slow links (`hvdkit hosts`), a rank of one thread on each: ResNet-20 on MNIST's 5,000 images.
Three kinds of runs, kept in `runs/own-hosts`, so that what is interrupted goes on where it was:

- `hvdkit profile` of each method at 2 ranks on this machine, without any slow link;
- `hvdkit bench`, allreduce and allgather, over the slow links;
- turns: all methods in one process a rank, a few steps each in random order, round after round, and with them
  `compute`, the same ranks at the same time that send nothing (Local SGD that never synchronizes).

Predictions start from the first two and are compared with the third, as ratios to `compute` of the same round: four
ranks share this machine's cores, so what they compute is not what two do. PyTorch at three rates, the other frameworks
at one. Needs a quiet machine and network namespaces. Writes own-hosts.json.gz and own-hosts-profiles.json.gz beside
itself, with the frameworks that were asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import harness, in_turns, written
from benchmarks.harness import FRAMEWORKS
from hvdkit.launch.namespaces import Network
from hvdkit.results.bench import Bench
from hvdkit.results.profile import load as load_profile
from hvdkit.simulator import cluster as clusters

RATE, OTHER_RATES = 50.0, (20.0, 100.0)  # Mbit/s: of all frameworks, and of PyTorch beside it
RANKS, ROUNDS = 4, 5
RECIPE, KEYS = "resnet20-digits", ["data={name: mnist5k}", "batch_size=25", "threads=1"]
COMPUTE, DENSE = "compute", "dense"
# Of Local SGD whole rounds are left out and measured.
METHODS: dict[str, in_turns.Side] = {
    DENSE: ([], 1, 6),
    "fp16": (["compression=fp16"], 1, 6),
    "topk": (["compression={method: topk, ratio: 0.01}"], 1, 6),
    "hierarchical": (["allreduce=hierarchical"], 1, 6),
    "local4": (["sync={every: 4}"], 4, 8),
}
SIDES = METHODS | {COMPUTE: (["sync={every: 1000000}"], 1, 6)}
TURNS = [*METHODS, *[COMPUTE] * 3]  # of a round: every ratio depends on `compute`
TIMEOUT_S = 420.0


def main() -> None:
    """The command line."""
    args = harness.parser(__doc__, keep="own-hosts", frameworks=True).parse_args()
    keep, frameworks = harness.kept(args), args.framework or FRAMEWORKS
    rates = {name: sorted([RATE, *OTHER_RATES]) if name == FRAMEWORKS[0] else [RATE] for name in frameworks}
    places = [f"{framework}/{rate:g}" for framework in frameworks for rate in rates[framework]]
    profiles = harness.rounds(keep / "profiles", frameworks, list(METHODS), 1, profiled)
    links = harness.rounds(keep / "links", places, ["bench", "turns"], 1, measured)
    written.compressed(args.out / "own-hosts.json.gz", table(links))
    shortened = {framework: _shortened(found[0]) for framework, found in profiles.items()}
    written.compressed(args.out / "own-hosts-profiles.json.gz", shortened)
    print(f"written to {args.out}: {', '.join(frameworks)}; now `make validate`")


def profiled(framework: str, _: int, method: str, folder: Path) -> dict[str, Any]:
    """The profile of a method at 2 ranks."""
    options = ["--framework", framework, "-np", "2", "--steps", "32", "--out", str(folder)]
    harness.hvdkit(["profile", RECIPE, *options, *KEYS, *METHODS[method][0], "warmup_steps=4"], TIMEOUT_S)
    return load_profile(folder / "profile.json").model_dump(mode="json")


def measured(place: str, _: int, side: str, folder: Path) -> dict[str, Any]:
    """What collectives take over the slow links, or what turns of all methods take."""
    framework, rate = place.split("/")
    with Network(RANKS, float(rate)) as network:
        return (bench if side == "bench" else turns)(network, framework, folder)


def bench(network: Network, framework: str, folder: Path) -> dict[str, Any]:
    """The cluster file of `hvdkit bench`, and of each collective (bytes that a rank puts in, median µs)."""
    points: dict[str, list[tuple[int, float]]] = {}
    cluster = folder / "allreduce" / "cluster.yaml"
    # An allgather's size is what comes out of it.
    for operation, most, share in (("allreduce", 2_200_000, 1), ("allgather", 300_000, RANKS)):
        out = folder / operation
        out.mkdir(parents=True)
        options = ["--framework", framework, "-np", str(RANKS), "-H", network.hosts_option(), "--out", str(out)]
        options += ["--link-mbit-per-s", f"{network.mbit_per_s:g}", "--seconds", "1.2", "--factor", "2.83"]
        options += ["--min-bytes", "64", "--max-bytes", str(most), *(["--add-to", str(cluster)] if points else [])]
        harness.hvdkit(["bench", operation, *options], TIMEOUT_S, network.run)
        cluster = out / "cluster.yaml"
        found = Bench.model_validate_json((out / "bench.json").read_bytes())
        points[operation] = [(row.size_bytes // share, row.p50_us) for row in found.rows]
    return {"cluster": clusters.load(cluster).model_dump(exclude_defaults=True), "points": points}


def turns(network: Network, framework: str, folder: Path) -> dict[str, Any]:
    """What `turns_rank.py` finds."""
    return in_turns.take_turns(network, 1, framework, KEYS, SIDES, TURNS, ROUNDS, folder)


def table(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What was measured over the slow links by place, as own-hosts.json.gz holds it."""
    links, turns, versions = [], [], {}
    for place, (one,) in found.items():
        framework, rate = place.split("/")
        where = {"framework": framework, "mbit_per_s": float(rate)}
        rounds = in_turns.turn_ms(one["turns"]["rounds"])
        steps = {name: [round(each[name], 3) for each in rounds] for name in SIDES}
        links.append(where | one["bench"])
        turns.append(where | {"load": one["turns"]["load"], "step_ms": steps})
        versions[framework] = one["turns"]["versions"]["framework"]
    return {
        **written.facts("make bench-hosts"),
        "versions": versions,
        "setting": {"recipe": RECIPE, "keys": KEYS, "hosts": RANKS, "rounds": ROUNDS},
        "methods": {name: {"keys": keys, "steps": steps} for name, (keys, _, steps) in SIDES.items()},
        "turns": turns,
        "links": links,
    }


def _shortened(profiles: dict[str, Any]) -> dict[str, Any]:
    """The dense profile in full, of each other method what it changes."""
    changes = {
        name: {key: other[key] for key in ("settings", "compression", "step")}
        for name, other in profiles.items()
        if name != DENSE
    }
    return {"dense": profiles[DENSE], "changes": changes}


if __name__ == "__main__":
    harness.exit_with(main)
