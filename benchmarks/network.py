"""How fast training gets on a network that is slow beside the computers, and at which accuracy: bench-network.json.

    make bench-network    (or: .venv/bin/python benchmarks/network.py --share 0.7 --method dense --method local8)

Four hosts with slow links between them (`hosts.py`), a rank of one thread on each: ResNet-20 on MNIST's 5,000
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

import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import network_picture
import starved
from harness import Start, one_round, say, step_ms
from hosts import Network
from starved import COMPUTE, DENSE, MARKS, Row, Solved, Story

from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.results.train import TrainResult
from hvdkit.tasks.resnet import architecture
from hvdkit.tasks.task import parameter_count

PICTURE = harness.HERE.parent / "docs" / "images" / "bench-network.png"
FRAMEWORK, OTHERS = "pytorch", ("tensorflow", "keras", "mxnet")
RANKS, BATCH, IMAGES = 4, 16, 4000
STEPS_PER_EPOCH = IMAGES // (RANKS * BATCH)
PARAMETERS = parameter_count(architecture("resnet20", 10))
FREE_MBIT_PER_S = 10_000.0
# The first guess at what dense communication costs (starved.cost_of): a ring over links of which 92 % is used.
FIRST_COST = 8e-3 * 2 * (RANKS - 1) / RANKS * 4 * PARAMETERS / 0.92
RECIPE = ["resnet20-digits", "data={name: mnist5k}", f"batch_size={BATCH}", "threads=1"]
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


class Bench:
    """The runs of one benchmark, kept in a folder; what is there is not run again."""

    def __init__(self, keep: Path, rounds: int, seeds: int, epochs: int) -> None:
        self.keep, self.rounds, self.seeds, self.epochs = keep, rounds, seeds, epochs

    def settle(self) -> None:
        """See that what is kept was made by the same settings. Raises RequestError where it was not."""
        plan = {"recipe": RECIPE, "epochs": self.epochs, "methods": {name: list(m.keys) for name, m in METHODS.items()}}
        path = self.keep / "plan.json"
        if path.exists() and json.loads(path.read_text()) != plan:
            raise RequestError(f"{path}: it was run with other settings; give --fresh, or another --keep")
        self.keep.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(plan, indent=2) + "\n")

    def rate(self, network: Network, framework: str, share: float) -> Solved:
        """The links' rate at which dense communication has this share of the framework's step: found once, and kept.

        What communication costs does not depend on the framework, so what is known of another is the first guess.
        """
        path = self.keep / "rates" / f"{framework}-{share:g}.json"
        if path.exists():
            return Solved(**json.loads(path.read_text()))
        tried = self.keep / "tries" / f"{framework}-{share:g}"
        shutil.rmtree(tried, ignore_errors=True)

        def computing() -> float:
            return step_ms(timed(network, FREE_MBIT_PER_S, framework, COMPUTING, tried / COMPUTE))

        def both(rate: float) -> tuple[float, float]:
            """One directly after the other, as a machine's speed changes over hours."""
            dense = step_ms(timed(network, rate, framework, METHODS[DENSE], tried / f"{rate:.2f}"))
            alone = computing()
            part = f"{starved.share_of(alone, dense):.1%} communication"
            say(f"{framework}, {rate:.2f} Mbit/s: dense step {dense:.0f} ms, computing {alone:.0f} ms: {part}")
            return alone, dense

        path.parent.mkdir(exist_ok=True)
        known = [json.loads(other.read_text())["cost"] for other in sorted(path.parent.glob("*.json"))]
        found = starved.solve(share, known[-1] if known else FIRST_COST, both, computing())
        write_atomic(path, json.dumps(asdict(found)) + "\n")
        return found

    def round(self, network: Network, framework: str, share: float, number: int, names: list[str]) -> None:
        """See that there are more than `number` rounds of these methods at the share's rate."""
        sides = sorted({COMPUTE, DENSE, *names})
        done = self.rounds_of(framework, share)
        if sum(set(sides) <= each.keys() for each in done) > number:
            return
        rate = self.rate(network, framework, share).mbit_per_s

        def run(side: str, folder: Path) -> dict[str, Any]:
            method = (FREE_MBIT_PER_S, COMPUTING) if side == COMPUTE else (rate, METHODS[side])
            result = timed(network, method[0], framework, method[1], folder)
            say(f"{framework}, {share:.0%}, round {len(done) + 1}: {side} {step_ms(result):.0f} ms a step")
            return result.model_dump(mode="json")

        one_round(self.keep / "speed" / framework / f"{share:g}" / f"{len(done):02d}", sides, run)

    def rounds_of(self, framework: str, share: float) -> list[dict[str, TrainResult]]:
        """The whole rounds, each by method."""
        return self._kept(f"speed/{framework}/{share:g}/*")

    def accuracy(self, framework: str, method: str) -> None:
        """Train it in full, with every seed."""
        for seed in range(1, self.seeds + 1):

            def run(side: str, folder: Path, seed: int = seed) -> dict[str, Any]:
                keys = [*RECIPE, *METHODS[side].keys, f"epochs={self.epochs}", f"seed={seed}"]
                result = train(subprocess.run, framework, keys, [], folder)
                say(f"{framework}, {side}, seed {seed}: accuracy {result.val_accuracy:.4f}")
                return result.model_dump(mode="json")

            one_round(self.keep / "accuracy" / framework / method / str(seed), [method], run)

    def accuracies(self, framework: str, method: str) -> list[float]:
        """Of every seed that was trained."""
        found = [each[method].val_accuracy for each in self._kept(f"accuracy/{framework}/{method}/*")]
        return [accuracy for accuracy in found if accuracy is not None]

    def rows(self, framework: str, share: float, names: list[str], reference: str = FRAMEWORK) -> list[Row]:
        """A row for each method that any round has; accuracies are compared with the reference's dense."""
        rounds = self.rounds_of(framework, share)
        times = [{side: step_ms(result) for side, result in each.items()} for each in rounds]
        dense = self.accuracies(reference, DENSE)
        rows = []
        for name in names:
            if sent := [each[name].bytes_per_step or 0.0 for each in rounds if name in each]:
                rate = json.loads((self.keep / "rates" / f"{framework}-{share:g}.json").read_text())["mbit_per_s"]
                mine, accuracies = [each for each in times if name in each], self.accuracies(framework, name)
                rows.append(
                    starved.row(name, framework, share, rate, mine, STEPS_PER_EPOCH, sent[0], accuracies, dense)
                )
        return rows

    def versions_and_load(self) -> tuple[dict[str, str], float | None]:
        """The frameworks' versions, and the largest share of CPU time that others took from a timed run."""
        results = [one for each in self._kept("speed/*/*/*") for one in each.values()]
        versions = {one.framework: one.framework_version for one in results}
        return versions, max((one.load for one in results if one.load is not None), default=None)

    def _kept(self, folders: str) -> list[dict[str, TrainResult]]:
        return [
            {side: TrainResult.model_validate(one) for side, one in json.loads(path.read_text()).items()}
            for path in sorted(self.keep.glob(f"{folders}/round.json"))
        ]


def timed(network: Network, mbit_per_s: float, framework: str, method: Method, folder: Path) -> TrainResult:
    """Some steps of a method over the network, its links set to a rate; all in one epoch, so nothing is evaluated."""
    network.set_rate(mbit_per_s)
    steps = method.warmup + method.measured
    assert steps <= STEPS_PER_EPOCH, "ranks synchronize before an evaluation, which belongs to no step"
    # A line of metrics is communication too: after the steps.
    keys = [*RECIPE, *method.keys, f"steps={steps}", f"warmup_steps={method.warmup}", f"log_every={STEPS_PER_EPOCH}"]
    return train(network.run, framework, keys, ["-H", network.hosts_option()], folder)


def train(start: Start, framework: str, keys: list[str], options: list[str], folder: Path) -> TrainResult:
    """`hvdkit train` of a recipe and its overrides into a folder. Raises as `harness.run` does."""
    return harness.train(framework, RANKS, keys[0], keys[1:], folder, options, start)


def measure(bench: Bench, shares: list[float], names: list[str], others: list[str], parts: list[str]) -> None:
    """All that is asked for and not there yet, times first: they need the network, and show problems soonest."""
    if "speed" in parts:
        with Network(RANKS, FREE_MBIT_PER_S) as network:
            for number in range(bench.rounds):
                for share in shares:
                    bench.round(network, FRAMEWORK, share, number, names)
            for framework in others:
                for number in range(bench.rounds):
                    bench.round(network, framework, OTHERS_SHARE, number, [OTHERS_METHOD])
    if "accuracy" in parts:
        for name in dict.fromkeys([DENSE, *names]):
            bench.accuracy(FRAMEWORK, name)
        for framework in others:
            bench.accuracy(framework, OTHERS_METHOD)


def story(bench: Bench, shares: list[float], names: list[str], others: list[str]) -> Story:
    """All rows."""
    rows = [row for share in shares for row in bench.rows(FRAMEWORK, share, list(dict.fromkeys([DENSE, *names])))]
    rows += [row for framework in others for row in bench.rows(framework, OTHERS_SHARE, [OTHERS_METHOD])]
    versions, load = bench.versions_and_load()
    setting = {"model": "resnet20", "data": "mnist5k", "hosts": RANKS, "batch_size": BATCH}
    return Story(
        command="make bench-network",
        marks={f"{share:g}": mark for share, mark in MARKS.items()},
        setting=setting | {"steps_per_epoch": STEPS_PER_EPOCH, "epochs": bench.epochs, "threads": 1},
        methods={name: METHODS[name].says for name in METHODS if any(row.method == name for row in rows)},
        rows=rows,
        load=load,
        versions=versions,
        machine=this_machine().model_dump(),
        measured=time.strftime("%-d %B %Y", time.gmtime()),
    )


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, rounds=ROUNDS, keep="bench-network")
    add = partial(parser.add_argument, action="append")
    add("--share", type=float, choices=list(MARKS), help="only this one of a dense step (may be repeated)")
    add("--method", choices=list(METHODS), help="only this one, and dense (may be repeated)")
    add("--other", choices=[*OTHERS, "none"], help=f"only this framework beside {FRAMEWORK} (may be repeated)")
    add(
        "--part",
        choices=["speed", "accuracy", "page"],
        help="only times, only accuracies, or only report what is there",
    )
    for name, default in (("seeds", SEEDS), ("epochs", EPOCHS)):
        about = f"of full training (default {default})"
        parser.add_argument(f"--{name}", type=harness.positive, default=default, help=about)
    parser.add_argument(
        "--out", type=Path, default=harness.HERE, help="folder for json and md (default: this script's)"
    )
    args = parser.parse_args()
    shares, names = args.share or list(MARKS), args.method or list(METHODS)
    others = [name for name in args.other or OTHERS if name != "none"]
    bench = Bench(harness.kept(args), args.rounds, args.seeds, args.epochs)
    bench.settle()
    measure(bench, shares, names, others, args.part or ["speed", "accuracy"])
    found = story(bench, shares, names, others)
    if not found.rows:
        print("error: no round is whole yet: nothing to report", file=sys.stderr)
        return 1
    missed = starved.missed(found.rows, FRAMEWORK, MARKS)
    harness.publish("bench-network", found.model_dump(mode="json"), args.out, missed=missed)
    network_picture.picture(found, PICTURE if args.out == harness.HERE else args.out / PICTURE.name)
    return 1 if missed else 0


if __name__ == "__main__":
    harness.exit_with(main)
