"""How fast training gets on a network that is slow beside the computers, and at which accuracy: bench-network.json.

    make bench-network    (or: .venv/bin/python -m benchmarks.network --share 0.7 --method dense --method local8)

Four hosts with slow links between them (`hvdkit hosts`), a rank of one thread on each: ResNet-20 on MNIST's 5,000
images. The links' rate is chosen so that dense float32 communication takes 70 % of a step, then 90 %. A round runs
all methods directly after each other, in random order, and with them the dense step and `compute`, the same ranks at
the same time that send nothing (Local SGD that never synchronizes): these two are the limit. All figures are
ratios within a round. Times are of whole rounds of Local SGD, on the slowest rank. Accuracy is of full training
without a slow link, by the same four ranks, as the arithmetic does not know how fast a link is; three seeds.

PyTorch does it all, the other frameworks one method at one rate. What is done is kept in `runs/bench-network` and not
run again: give `--fresh` after a change of code. Needs a quiet machine and network namespaces. Writes
bench-network.json and bench-network.md beside itself and docs/images/bench-network.png. Exit status 1 where a mark is
missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, starved, written
from benchmarks.harness import say, step_ms
from benchmarks.starved import COMPUTE, DENSE, MARKS, Row
from hvdkit.launch.namespaces import Network
from hvdkit.tasks.resnet import architecture
from hvdkit.tasks.task import parameter_count

PICTURE = harness.HERE.parent / "docs" / "images" / "bench-network.png"
FRAMEWORK, OTHERS = "pytorch", ("tensorflow", "keras", "mxnet")
RANKS, BATCH, IMAGES = 4, 16, 4000
STEPS_PER_EPOCH = IMAGES // (RANKS * BATCH)
PARAMETERS = parameter_count(architecture("resnet20", 10))
FREE_MBIT_PER_S = 10_000.0
# The first guess at what dense communication costs: a ring over links of which 92 % is used.
FIRST_COST = 8e-3 * 2 * (RANKS - 1) / RANKS * 4 * PARAMETERS / 0.92
RECIPE, KEYS = "resnet20-digits", ["data={name: mnist5k}", f"batch_size={BATCH}", "threads=1"]
EPOCHS, SEEDS, ROUNDS = 6, 3, 2


@dataclass(frozen=True)
class Method:
    """What is added to the recipe, after how many updates ranks synchronize, and how many steps of it are measured."""

    says: str
    keys: tuple[str, ...] = ()
    every: int = 1
    measured: int = 8

    @property
    def warmup(self) -> int:
        """Steps that are not measured: whole rounds, as those that are."""
        return self.every * math.ceil(4 / self.every)


def _rate(share: float) -> str:
    """The recipe's learning rate, or a share of it: a rank alone takes noisier steps than all together."""
    return f"optimizer.learning_rate={0.05 * share:g}"


def _local(every: int, *keys: str, outer: str = "none", rate: float = 0.5) -> tuple[str, ...]:
    return (f"sync={{every: {every}, outer: {outer}}}", _rate(rate), *keys)


METHODS = {
    DENSE: Method("float32, each update"),
    "fp16": Method("float16, each update", ("compression=fp16",)),
    "int8": Method("8 bits, each update", ("compression=int8",)),
    "topk": Method("the largest 1 %, each update", ("compression={method: topk, ratio: 0.01}",), measured=16),
    "powersgd": Method("rank 2, each update", ("compression={method: powersgd, rank: 2}",), measured=16),
    "local4": Method("Local SGD, float32 each 4 updates", _local(4), 4, 16),
    "local8": Method("Local SGD, float32 each 8 updates", _local(8), 8, 16),
    "diloco": Method(
        "DiLoCo, float32 each 10 updates, Nesterov with η 0.7 and μ 0.9", _local(10, outer="nesterov"), 10, 20
    ),
    "local4-topk": Method(
        "Local SGD, the largest 1 % each 4 updates", _local(4, "compression={method: topk, ratio: 0.01}"), 4, 48
    ),
    "local24-int8": Method("Local SGD, 8 bits each 24 updates", _local(24, "compression=int8"), 24, 24),
}
COMPUTING = Method("nothing is sent", _local(10**6), 1, 56)
OTHERS_METHOD, OTHERS_SHARE = "local24-int8", 0.7
Asked = tuple[str, Sequence[float], Sequence[str]]  # framework, shares, methods
Round = dict[str, dict[str, Any]]  # results by method
Accuracies = dict[tuple[str, str], list[float]]  # by framework and method


def chosen(network: Network, framework: str, share: float, cost: float, _: str, folder: Path) -> dict[str, float]:
    """The links' rate at which dense communication has this share of the framework's step; `cost` is a first guess."""
    alone = step_ms(timed(network, FREE_MBIT_PER_S, framework, COMPUTING, folder / COMPUTE))
    guess = starved.rate_for(share, alone, cost)
    dense = step_ms(timed(network, guess, framework, METHODS[DENSE], folder / DENSE))
    say(f"{framework}, {guess:.2f} Mbit/s: {starved.share_of(alone, dense):.1%} communication")
    measured = (dense - alone) * guess
    return {"mbit_per_s": starved.rate_for(share, alone, measured), "cost": measured}


def speeds(network: Network, asked: Sequence[Asked], count: int, keep: Path) -> dict[tuple[str, float], list[Round]]:
    """Rounds of the methods at the shares' rates, with the dense step and the one that sends nothing."""
    found, cost = {}, FIRST_COST  # it does not depend on the framework: what is known of another is the first guess
    for framework, shares, names in asked:
        at = {}
        for share in shares:
            run = partial(chosen, network, framework, share, cost)
            one = harness.one_round(keep / "rates" / framework / f"{share:g}", ["found"], run)["found"]
            at[f"{share:g}"], cost = one["mbit_per_s"], one["cost"]
        step = partial(timed_at, network, framework, at)
        rounds = harness.rounds(keep / "speed" / framework, at, sorted({COMPUTE, DENSE, *names}), count, step)
        found |= {(framework, share): rounds[f"{share:g}"] for share in shares}
    return found


def accuracies(asked: Sequence[Asked], seeds: int, epochs: int, keep: Path) -> Accuracies:
    """Of full training by each method, with every seed."""
    found = {}
    for framework, _, names in asked:
        done = harness.rounds(keep / framework, names, ["trained"], seeds, partial(trained, framework, epochs))
        for name, rounds in done.items():
            found[framework, name] = [one["trained"]["val_accuracy"] for one in rounds]
    return found


def rows(framework: str, share: float, names: Sequence[str], rounds: list[Round], accurate: Accuracies) -> list[Row]:
    """A row for each method; accuracies are compared with those of FRAMEWORK's dense."""
    times, made = [{side: step_ms(result) for side, result in one.items()} for one in rounds], []
    for name in names:
        row = {"rate_mbit_per_s": rounds[-1][name]["mbit_per_s"], "method": name, "framework": framework}
        row |= {"asked_share": share, "bytes_per_step": rounds[0][name]["bytes_per_step"] or 0.0}
        own, dense = accurate[framework, name], accurate[FRAMEWORK, DENSE]
        made.append(row | starved.row(times, name, STEPS_PER_EPOCH, own, dense))
    return made


def story(rows: list[Row], results: Sequence[dict[str, Any]], epochs: int) -> dict[str, Any]:
    """`bench-network.json`. `load` is the largest share of the machine's CPU time that others took from a run."""
    setting = {"model": "resnet20", "data": "mnist5k", "hosts": RANKS, "batch_size": BATCH}
    return {
        "command": "make bench-network",
        "marks": {f"{share:g}": mark for share, mark in MARKS.items()},
        "setting": setting | {"steps_per_epoch": STEPS_PER_EPOCH, "epochs": epochs, "threads": 1},
        "methods": {name: METHODS[name].says for name in METHODS if any(row["method"] == name for row in rows)},
        "missed": starved.missed(rows, FRAMEWORK),
        "rows": rows,
        "load": max((one["load"] for one in results if one["load"] is not None), default=None),
        "versions": {one["framework"]: one["framework_version"] for one in results},
    }


def trained(framework: str, epochs: int, method: str, number: int, _: str, folder: Path) -> dict[str, Any]:
    """Full training by a method, without a slow link."""
    keys = [*KEYS, *METHODS[method].keys, f"epochs={epochs}", f"seed={number + 1}"]
    return harness.train(framework, RANKS, RECIPE, keys, folder)


def timed_at(
    network: Network, framework: str, rates: dict[str, float], share: str, _: int, side: str, folder: Path
) -> dict[str, Any]:
    """Some steps of a method at a share's rate; of the one that sends nothing, at a rate that does not matter."""
    method, rate = (COMPUTING, FREE_MBIT_PER_S) if side == COMPUTE else (METHODS[side], rates[share])
    return timed(network, rate, framework, method, folder)


def timed(network: Network, mbit_per_s: float, framework: str, method: Method, folder: Path) -> dict[str, Any]:
    """Some steps of a method over the network, its links set to a rate; all in one epoch, so nothing is evaluated."""
    network.set_rate(mbit_per_s)
    steps = method.warmup + method.measured
    assert steps <= STEPS_PER_EPOCH, "ranks synchronize before an evaluation, which belongs to no step"
    # A line of metrics is communication too: after the steps.
    keys = [*KEYS, *method.keys, f"steps={steps}", f"warmup_steps={method.warmup}", f"log_every={STEPS_PER_EPOCH}"]
    where = ["-H", network.hosts_option()]
    result = harness.train(framework, RANKS, RECIPE, keys, folder, where, start=network.run)
    return result | {"mbit_per_s": mbit_per_s}


def picture(rows: list[Row], path: Path) -> None:
    """How many times as fast the first framework's steps are by method, at each share; accuracies beside the names."""
    rows = [row for row in rows if row["framework"] == rows[0]["framework"]]
    shown: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in rows:
        low = "" if row["as_accurate"] in (True, None) else ", too low"
        rated = "" if row["accuracy_mean"] is None else f": {row['accuracy_mean']:.3f}{low}"
        series = f"{100 * row['asked_share']:.0f} % communication, {row['rate_mbit_per_s']:.1f} Mbit/s"
        shown.setdefault(f"{row['method']}{rated}", {})[series] = (row["speedup"],) * 3
    written.dots(path, [("each method with its accuracy, the mean over seeds", "times as fast as uncompressed", shown)])


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, rounds=ROUNDS, keep="bench-network")
    add = partial(parser.add_argument, action="append")
    add("--share", type=float, choices=list(MARKS), help="only this one of a dense step (may be repeated)")
    add("--method", choices=list(METHODS), help="only this one, and dense (may be repeated)")
    add("--other", choices=[*OTHERS, "none"], help=f"only this framework beside {FRAMEWORK} (may be repeated)")
    for name, default in (("seeds", SEEDS), ("epochs", EPOCHS)):
        about = f"of full training (default {default})"
        parser.add_argument(f"--{name}", type=harness.positive, default=default, help=about)
    args = parser.parse_args()
    others = [name for name in args.other or OTHERS if name != "none"]
    names = list(dict.fromkeys([DENSE, *(args.method or METHODS)]))
    asked: list[Asked] = [(FRAMEWORK, args.share or list(MARKS), names)]
    asked += [(framework, [OTHERS_SHARE], [OTHERS_METHOD]) for framework in others]
    keep = harness.kept(args)
    # Times first: they need the network, and show problems soonest.
    with Network(RANKS, FREE_MBIT_PER_S) as network:
        rounds = speeds(network, asked, args.rounds, keep)
    accurate = accuracies(asked, args.seeds, args.epochs, keep / f"accuracy-{args.epochs}-epochs")
    places = [(framework, share, names) for framework, shares, names in asked for share in shares]
    made = [row for place in places for row in rows(*place, rounds[place[:2]], accurate)]
    results = [result for each in rounds.values() for one in each for result in one.values()]
    found = story(made, results, args.epochs)
    written.publish("bench-network", found, args.out)
    picture(found["rows"], PICTURE if args.out == harness.HERE else args.out / PICTURE.name)
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    harness.exit_with(main)
