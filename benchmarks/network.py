"""How fast training gets on a network that is slow beside the computers, and at which accuracy: bench-network.json.

    make bench-network    (or: .venv/bin/python benchmarks/network.py --share 0.7 --method dense --method local8)

Four hosts with starved links between them (`hosts.py`), a rank of one thread on each: ResNet-20 on MNIST's 5,000
images. The links' rate is chosen so that dense float32 communication takes 70 % of a step, then 90 %. A round runs
all methods directly after each other, in random order, and with them the dense step and `compute`, the same ranks at
the same time without a word between them (Local SGD that never meets): these two are the limit. All figures are
ratios within a round. Times are of whole rounds of Local SGD, on the slowest rank. Accuracy is of full training
without a slow link, by the same four ranks, as the arithmetic does not know how fast a link is; three seeds.

PyTorch does it all, the other frameworks one method at one rate. What is done is kept in `runs/bench-network` and not
run again: give `--fresh` after a change of code. Needs a quiet machine and network namespaces. Writes
bench-network.json and bench-network.md beside itself and docs/images/bench-network.png. Exit status 1 where a mark is
missed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import commands
import network_page
import starved
from commands import Start
from hosts import Network, Unavailable
from starved import COMPUTE, DENSE, MARKS, Row, Solved, Story

from hvdkit.errors import HvdkitError, RequestError
from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.results.train import TrainResult, read_result
from hvdkit.tasks.resnet import architecture, parameter_count

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "images" / "bench-network.png"
FRAMEWORK, OTHERS = "pytorch", ("tensorflow", "keras", "mxnet")
RANKS, BATCH, IMAGES = 4, 16, 4000
STEPS_PER_EPOCH = IMAGES // (RANKS * BATCH)
PARAMETERS = parameter_count(architecture("resnet20", 10))
FREE_MBIT_PER_S = 10_000.0
# The first guess at what dense communication costs (starved.cost_of): a ring over links of which 92 % is used.
FIRST_COST = 8e-3 * 2 * (RANKS - 1) / RANKS * 4 * PARAMETERS / 0.92
RECIPE = ["resnet20-digits", "data={name: mnist5k}", f"batch_size={BATCH}", "threads=1"]
EPOCHS, SEEDS, ROUNDS = 6, 3, 2
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Method:
    """What is added to the recipe, after how many updates ranks meet, and how many steps of it are measured."""

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
        self.began = time.monotonic()

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
            """One directly after the other, as a machine has its hours."""
            dense = step_ms(timed(network, rate, framework, METHODS[DENSE], tried / f"{rate:.2f}"))
            alone = computing()
            self.say(
                f"{framework}: at {rate:.2f} Mbit/s a dense step takes {dense:.0f} ms, computing {alone:.0f} ms: "
                f"{starved.share_of(alone, dense):.1%} communication"
            )
            return alone, dense

        path.parent.mkdir(exist_ok=True)
        known = [json.loads(other.read_text())["cost"] for other in sorted(path.parent.glob("*.json"))]
        found = starved.solve(share, known[-1] if known else FIRST_COST, both, computing())
        write_atomic(path, json.dumps(asdict(found)) + "\n")
        return found

    def round(self, network: Network, framework: str, share: float, number: int, names: list[str]) -> None:
        """See that there are more than `number` rounds of these methods at the share's rate.

        One that was broken off begins again: hours may lie between.
        """
        sides = sorted({COMPUTE, DENSE, *names})
        done = self.rounds_of(framework, share)
        if sum(set(sides) <= each.keys() for each in done) > number:
            return
        rate = self.rate(network, framework, share).mbit_per_s
        folder = self.keep / "speed" / framework / f"{share:g}"
        under_way = folder / "under-way"
        shutil.rmtree(under_way, ignore_errors=True)
        random.Random(f"{framework} {share} {len(done)}").shuffle(sides)
        for side in sides:
            computing = side == COMPUTE
            mbit_per_s = FREE_MBIT_PER_S if computing else rate
            result = timed(network, mbit_per_s, framework, COMPUTING if computing else METHODS[side], under_way / side)
            self.say(f"{framework}, {share:.0%}, round {len(done) + 1}: {side} {step_ms(result):.0f} ms a step")
        under_way.rename(folder / f"{len(done):02d}")

    def rounds_of(self, framework: str, share: float) -> list[dict[str, TrainResult]]:
        """The whole rounds, each by method."""
        return [self._results(each) for each in sorted((self.keep / "speed" / framework / f"{share:g}").glob("[0-9]*"))]

    def accuracy(self, framework: str, method: str) -> None:
        """Train it in full, with every seed."""
        for seed in range(1, self.seeds + 1):
            folder = self.keep / "accuracy" / framework / method / str(seed)
            if not (folder / "result.json").exists():
                keys = [*RECIPE, *METHODS[method].keys, f"epochs={self.epochs}", f"seed={seed}"]
                result = train(subprocess.run, framework, keys, [], folder)
                self.say(f"{framework}, {method}, seed {seed}: accuracy {result.val_accuracy:.4f}")

    def rows(self, framework: str, share: float, names: list[str], reference: str = FRAMEWORK) -> list[Row]:
        """What the methods come to, those that all rounds have; accuracies are held against the reference's dense."""
        rounds = self.rounds_of(framework, share)
        if not rounds:
            return []
        times = [{side: step_ms(result) for side, result in each.items()} for each in rounds]
        rate = json.loads((self.keep / "rates" / f"{framework}-{share:g}.json").read_text())["mbit_per_s"]
        dense = self.accuracies(reference, DENSE)
        return [
            starved.row(
                name,
                framework,
                share,
                rate,
                [each for each in times if name in each],
                STEPS_PER_EPOCH,
                next(each[name].bytes_per_step or 0.0 for each in rounds if name in each),
                self.accuracies(framework, name),
                dense,
            )
            for name in names
            if any(name in each for each in rounds)
        ]

    def accuracies(self, framework: str, method: str) -> list[float]:
        """Of every seed that was trained."""
        found = self._results(self.keep / "accuracy" / framework / method).values()
        return [result.val_accuracy for result in found if result.val_accuracy is not None]

    def versions_and_load(self) -> tuple[dict[str, str], float | None]:
        """The frameworks' versions, and the largest share of CPU time that others took from a timed run."""
        results = [read_result(path) for path in sorted((self.keep / "speed").rglob("result.json"))]
        versions = {one.framework: one.framework_version for one in results}
        return versions, max((one.load for one in results if one.load is not None), default=None)

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    @staticmethod
    def _results(folder: Path) -> dict[str, TrainResult]:
        return {path.parent.name: read_result(path) for path in sorted(folder.glob("*/result.json"))}


def timed(network: Network, mbit_per_s: float, framework: str, method: Method, folder: Path) -> TrainResult:
    """Some steps of a method over the network, its links set to a rate; all in one epoch, so nothing is evaluated."""
    network.set_rate(mbit_per_s)
    steps = method.warmup + method.measured
    assert steps <= STEPS_PER_EPOCH, "the meeting before an evaluation is no step's"
    # A line of metrics is a word between ranks: behind the steps.
    keys = [*RECIPE, *method.keys, f"steps={steps}", f"warmup_steps={method.warmup}", f"log_every={STEPS_PER_EPOCH}"]
    return train(network.run, framework, keys, ["-H", network.hosts_option()], folder)


def train(start: Start, framework: str, keys: list[str], options: list[str], folder: Path) -> TrainResult:
    """`hvdkit train` into a folder. Raises as `commands.run` does."""
    options = ["--framework", framework, "-np", str(RANKS), *options, "--out", str(folder), "--overwrite"]
    folder.mkdir(parents=True, exist_ok=True)
    commands.hvdkit(start, ["train", keys[0], *options, *keys[1:], "checkpoint=null"], TIMEOUT_S)
    return read_result(folder / "result.json")


def step_ms(result: TrainResult) -> float:
    """Milliseconds a step: a mean, as with Local SGD only some steps send."""
    return 1e3 * result.batch_size * result.np / result.images_per_second


def measure(bench: Bench, shares: list[float], names: list[str], others: list[str], parts: list[str]) -> None:
    """All that is asked for and not there yet, times first: they need the network, and tell soonest."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, action="append")
    add("--share", type=float, choices=list(MARKS), help="only this one of a dense step (may be repeated)")
    add("--method", choices=list(METHODS), help="only this one, and dense (may be repeated)")
    add("--other", choices=[*OTHERS, "none"], help=f"only this framework beside {FRAMEWORK} (may be repeated)")
    add("--part", choices=["speed", "accuracy", "page"], help="only times, only accuracies, or only tell what is there")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all methods (default {ROUNDS})")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of full training (default {SEEDS})")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of full training (default {EPOCHS})")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "bench-network", help="where runs are kept")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for json and md (default: this script's)")
    args = parser.parse_args()
    for name in ("rounds", "seeds", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    shares, names = args.share or list(MARKS), args.method or list(METHODS)
    others = [name for name in args.other or OTHERS if name != "none"]
    if args.fresh:
        shutil.rmtree(args.keep, ignore_errors=True)
    bench = Bench(args.keep.absolute(), args.rounds, args.seeds, args.epochs)
    try:
        bench.settle()
        measure(bench, shares, names, others, args.part or ["speed", "accuracy"])
    except (Unavailable, HvdkitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    found = story(bench, shares, names, others)
    if not found.rows:
        print("error: no round is whole yet: nothing to tell", file=sys.stderr)
        return 1
    short = starved.missed(found.rows, FRAMEWORK, MARKS)
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out / "bench-network.json", found.model_dump_json(indent=2) + "\n")
    write_atomic(args.out / "bench-network.md", network_page.page(found, short))
    network_page.picture(found, PICTURE if args.out == HERE else args.out / PICTURE.name)
    print(network_page.page(found, short))
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
