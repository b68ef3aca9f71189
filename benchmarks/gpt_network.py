"""A small GPT on four hosts with slow links: how fast each method is, and its loss after the same tokens.

    .venv/bin/python -m benchmarks.gpt_network        (or with: --method dense --method int8, --loss-only)

Transformers communicate much for what they compute. Loss is that of full training by four ranks without a slow link, as
the arithmetic does not know how fast a link is, with the recipe's tokens an update; so it may be measured on a busy
machine. Times are of rounds of all methods over links of one rate (`hvdkit hosts`), and need a quiet one. What is done
is kept in `runs/gpt-network` and not run again: give `--fresh` after a change of code. Writes gpt_network.json and
gpt_network.md beside itself.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from benchmarks.harness import step_ms
from hvdkit.launch.namespaces import Network
from hvdkit.recipe import registry, schema

FRAMEWORK, RECIPE, RANKS, MBIT_PER_S = "pytorch", "gpt-tiny", 4, 200.0
ROUNDS, SEEDS, EPOCHS = 5, 1, 4
WARMUP, MEASURED = 10, 20  # steps: whole rounds of Local SGD


@dataclass(frozen=True)
class Method:
    """What is added to the recipe. Without `learns`, it computes what dense training does, and only its time counts."""

    says: str
    keys: tuple[str, ...] = ()
    learns: bool = True


METHODS = {
    "dense": Method("float32, each update"),
    "int8": Method("8 bits, each update", ("compression=int8",)),
    "topk": Method("the largest 1 %, each update", ("compression={method: topk, ratio: 0.01}",)),
    "powersgd": Method("rank 2, each update", ("compression={method: powersgd, rank: 2}",)),
    "local10": Method("Local SGD, float32 each 10 updates", ("sync={every: 10}",)),
    "diloco": Method("DiLoCo, float32 each 10 updates, Nesterov", ("sync={every: 10, outer: nesterov}",)),
    "zero1": Method("ZeRO-1, float32, each update", ("sharding=optimizer",), learns=False),
    "zero2": Method("ZeRO-2, float32, each update", ("sharding=gradients",), learns=False),
    "zero3": Method("ZeRO-3, float32, each update", ("sharding=parameters",), learns=False),
}


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__, rounds=ROUNDS, keep="gpt-network")
    parser.add_argument("--method", action="append", choices=list(METHODS), help="only this one (may be repeated)")
    parser.add_argument("--loss-only", action="store_true", help="leave the times that are not there yet")
    for name, default in (("seeds", SEEDS), ("epochs", EPOCHS)):
        about = f"of full training (default {default})"
        parser.add_argument(f"--{name}", type=harness.positive, default=default, help=about)
    args = parser.parse_args()
    names, keep = args.method or list(METHODS), harness.kept(args)
    folder, learning = keep / f"loss-{args.epochs}-epochs", [name for name in names if METHODS[name].learns]
    losses = harness.rounds(folder, learning, ["trained"], args.seeds, partial(trained, args.epochs))
    times: list[dict[str, Any]] = []
    if not args.loss_only:
        with Network(RANKS, MBIT_PER_S) as network:
            times = harness.rounds(keep / "speed", ["steps"], names, args.rounds, partial(timed, network))["steps"]
    outcome = {
        "framework": FRAMEWORK,
        "recipe": RECIPE,
        "ranks": RANKS,
        "mbit_per_s": MBIT_PER_S,
        "epochs": args.epochs,
        "seeds": args.seeds,
        "rounds": len(times),
        "methods": {name: row(name, [one["trained"] for one in losses.get(name, ())], times) for name in names},
        **{key: losses[learning[0]][0]["trained"][key] for key in ("framework_version", "horovod_version")},
    }
    written.publish("gpt_network", outcome, args.out)


def keys_of(name: str) -> list[str]:
    """The recipe's keys of a method: as many tokens an update as the recipe's two ranks have."""
    batch = schema.load(registry.locate(Path(RECIPE))).batch_size * 2 // RANKS
    return [f"batch_size={batch}", "threads=1", *METHODS[name].keys]


def trained(epochs: int, name: str, number: int, _: str, folder: Path) -> dict[str, Any]:
    """Full training with a method, without a slow link."""
    keys = [*keys_of(name), f"epochs={epochs}", f"seed={number + 1}"]
    return harness.train(FRAMEWORK, RANKS, RECIPE, keys, folder, timeout_s=3600) | {"step_ms": []}


def timed(network: Network, _: str, number: int, name: str, folder: Path) -> dict[str, Any]:
    """Some steps of a method over the network; a line of metrics is communication too, and comes after the steps."""
    steps = WARMUP + MEASURED
    keys = [*keys_of(name), f"steps={steps}", f"warmup_steps={WARMUP}", f"log_every={steps}", "data.validation=0.01"]
    where = ["-H", network.hosts_option()]
    return harness.train(FRAMEWORK, RANKS, RECIPE, keys, folder, where, start=network.run)


def row(name: str, runs: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A method's figures: medians over seeds and rounds with their range; `speedup` is of ratios within rounds."""
    losses, steps = [one["validation"]["bits_per_byte"] for one in runs], [step_ms(one[name]) for one in rounds]
    dense = [step_ms(one["dense"]) for one in rounds if "dense" in one]
    return {
        "says": METHODS[name].says,
        "bits_per_byte": harness.median_and_range(losses) if losses else None,
        "bytes_per_step": (runs or [one[name] for one in rounds])[0]["bytes_per_step"],
        "step_ms": harness.median_and_range(steps) if steps else None,
        "speedup": statistics.median(a / b for a, b in zip(dense, steps, strict=True)) if dense else None,
    }


if __name__ == "__main__":
    harness.exit_with(main)
