"""Models that ranks divide, beside the same ranks with whole models, and beside PyTorch's own ways: parallel.json.

    .venv/bin/python -m benchmarks.parallel --central --rounds 3 --minutes 25
    .venv/bin/python -m benchmarks.parallel [--ranks 2] [--model 25M] [--side 1f1b] [--rounds 9] [--no-bytes]

First `hvdkit parity` holds each side that divides the model, and its rival, in float64 against one process; then all
sides of a round train directly after each other in random order, one thread a rank. All have the same samples a step,
so a ratio is one of steps' medians in the same round. `bubble` is the share of a step in which a rank computes nothing,
beside (p - 1) / (m + p - 1). Bytes are what hosts' interfaces count in a run of more steps less those in a run of
fewer, without the headers of their packets, a rank on each host (`hvdkit hosts`), where network namespaces can be made.
Memory is the peak of each stage's largest rank, and the states of the largest stage, beside what `hvdkit memory`
counts.

`--central` takes the sides and rivals that the documentation shows. What is done is kept in `runs/parallel` and not run
again: give `--fresh` after a change of code. After `--minutes` no further round begins. Times need a quiet machine,
with a core for each rank. Writes parallel.json and parallel.md beside itself; exit status 1 if parity does not hold.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.core.schedules import bubble
from hvdkit.launch.namespaces import Network
from hvdkit.recipe import registry, schema
from hvdkit.recipe.schema import Recipe
from hvdkit.simulator import memory as counting
from hvdkit.simulator.sharding import values_sent
from hvdkit.strategies.dense import ring_bytes
from hvdkit.tasks import choose
from hvdkit.tasks.gpt import GPT
from hvdkit.tasks.task import parameter_count

RANKS, SAMPLES, MICROBATCHES = (2, 4), 16, 8
GPT_KEYS = ["data.validation=0.01"]
MODELS: dict[str, tuple[str, list[str]]] = {
    "0.8M": ("gpt-tiny", GPT_KEYS),
    "25M": (
        "gpt-tiny",
        [*GPT_KEYS, "model={name: gpt, layers: 8, heads: 8, width: 512, context: 64, vocabulary: 256}"],
    ),
    "ResNet-50": ("resnet50-synthetic", ["data.height=64", "data.width=64", "data.val_images=16"]),
}
WARMUP, MEASURED = 2, {"0.8M": 20, "25M": 6, "ResNet-50": 6}  # steps of a run
FEWER, MBIT_PER_S = 2, 1000.0  # of bytes
ALWAYS = ["threads=1", "check_ranks=0", "schedule.warmup_epochs=0"]
PARITY_STEPS = 2
HEADERS = 66  # bytes of a packet: Ethernet's 14, IP's 20, TCP's 32 with its times
BASE = "data"


@dataclass(frozen=True)
class Side:
    """A way to train: overrides of the recipe, where `{np}` is the number of ranks, and its rival."""

    keys: tuple[str, ...] = ()
    rival: str | None = None

    @property
    def divides(self) -> bool:
        """Whether a rank has a part of the model."""
        return any(key.startswith("parallel.") for key in self.keys)

    def overrides(self, np: int, model: str) -> list[str]:
        """The recipe's keys; a data rank has its share of a step's samples."""
        keys = [key.replace("{np}", str(np)) for key in self.keys]
        return [*MODELS[model][1], *ALWAYS, f"batch_size={SAMPLES // (1 if self.divides else np)}", *keys]

    def recipe(self, np: int, model: str) -> Recipe:
        """The recipe as it is trained."""
        return schema.load(registry.locate(Path(MODELS[model][0])), self.overrides(np, model))

    def rival_of(self, model: str) -> str | None:
        """Its rival, if that trains the model."""
        return None if self.divides and model == "ResNet-50" else self.rival


def _stages(schedule: str) -> tuple[str, ...]:
    return "parallel.pipeline={np}", f"parallel.microbatches={MICROBATCHES}", f"parallel.schedule={schedule}"


SIDES = {
    BASE: Side(rival="ddp"),
    "zero1": Side(("sharding=optimizer",), "zero_redundancy"),
    "zero3": Side(("sharding=parameters",), "fsdp"),
    "gpipe": Side(_stages("gpipe"), "pipelining"),
    "1f1b": Side(_stages("1f1b"), "pipelining"),
    "tensor": Side(("parallel.tensor={np}",), "fsdp-tp"),
}
CENTRAL = (BASE, "zero1", "1f1b", "tensor")


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, rounds=9, keep="parallel")
    parser.add_argument("--ranks", type=int, choices=RANKS, action="append", help="only so many (may be repeated)")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--side", choices=SIDES, action="append", help=f"only this one, and {BASE}")
    parser.add_argument("--central", action="store_true", help=f"{', '.join(CENTRAL)}; rivals of divided models alone")
    parser.add_argument("--no-bytes", action="store_true", help="leave out what needs network namespaces")
    parser.add_argument("--minutes", type=harness.positive, default=24 * 60, help="after them no round begins")
    args = parser.parse_args()
    keep, until = harness.kept(args), time.monotonic() + 60 * args.minutes
    asked = args.side or (CENTRAL if args.central else SIDES)
    names = [name for name in SIDES if name == BASE or name in asked]
    cells = {f"{np}-{model}": (np, model) for np in args.ranks or RANKS for model in args.model or MODELS}
    runs = {cell: list(_runs(names, model, args.central)) for cell, (_, model) in cells.items()}
    proofs = {cell: {side: proved(side, *of, keep) for side in names} for cell, of in cells.items()}
    sent = {cell: {} if args.no_bytes else all_bytes(names, *of, keep) for cell, of in cells.items()}
    rounds: dict[str, list[dict[str, Any]]] = {cell: [] for cell in cells}
    for number in range(args.rounds):
        for cell, of in cells.items():
            if time.monotonic() < until:
                train = partial(trained, of)
                rounds[cell].append(harness.one_round(keep / cell / f"{number:02d}", runs[cell], train))
    rows = [
        row(side, *of, rounds[cell], proofs[cell][side], sent[cell].get(side))
        for cell, of in cells.items()
        for side in names
        if rounds[cell]
    ]
    every = [result for one in rounds.values() for done in one for result in done.values()]
    if not every:
        harness.say("no round was done, and nothing is written: give more --minutes")
        return 1
    outcome = {"load": max(result["load"] for result in every), "samples": SAMPLES, "microbatches": MICROBATCHES}
    outcome |= {key: every[0][key] for key in ("framework", "framework_version", "horovod_version")}
    written.publish("parallel", outcome | {"rows": rows}, args.out)
    return int(not all(proof["passed"] for of_cell in proofs.values() for proof in of_cell.values() if proof))


def _runs(names: Sequence[str], model: str, central: bool) -> Iterator[str]:
    for name in names:
        yield name
        side = SIDES[name]
        if (rival := side.rival_of(model)) and (side.divides or not central):
            yield f"{name}, {rival}"


def proved(side: str, np: int, model: str, keep: Path) -> dict[str, Any] | None:
    """Whether a side that divides the model, and its rival, compute what one process does.

    The worst tensor's error over the steps, by name; None for whole models, which other benchmarks prove.
    """
    found, folder = SIDES[side], keep / f"parity-{np}-{model}-{side}"
    if not found.divides:
        return None
    if not (folder / "parity.json").exists():
        harness.say(f"parity: {np} ranks, {model}, {side}")
        rival = found.rival_of(model)
        asked = ["--framework", "pytorch", *(["--rival", rival] if rival else []), "--steps", str(PARITY_STEPS)]
        where = ["-np", str(np), "--out", folder, "--overwrite"]
        try:
            harness.hvdkit(["parity", MODELS[model][0], *asked, *where, *found.overrides(np, model)])
        except harness.RunError:  # not passed, or not run
            if not (folder / "parity.json").exists():
                raise
    judged = json.loads((folder / "parity.json").read_text())
    return {
        "passed": judged["passed"],
        "step_f64": {name: each["step_f64"] for name, each in judged["frameworks"].items()},
    }


def trained(of: tuple[int, str], run: str, folder: Path) -> dict[str, Any]:
    """Some steps of a side, or of its rival."""
    (np, model), (side, _, rival) = of, run.partition(", ")
    steps = WARMUP + MEASURED[model]
    keys = [f"steps={steps}", f"warmup_steps={WARMUP}", f"log_every={steps}"]
    options = ["--rival", rival] if rival else []
    return harness.train("pytorch", np, MODELS[model][0], [*SIDES[side].overrides(np, model), *keys], folder, options)


def all_bytes(names: Sequence[str], np: int, model: str, keep: Path) -> dict[str, float]:
    """By side, what all hosts send in a step, on average over those by which one run is longer."""
    files = {side: keep / f"bytes-{np}-{model}-{side}.json" for side in names}
    if not all(file.exists() for file in files.values()):
        with Network(np, MBIT_PER_S) as network:
            for side, file in files.items():
                if not file.exists():
                    harness.say(f"bytes: {np} ranks, {model}, {side}")
                    more = FEWER + 2 * MEASURED[model]  # what else two runs differ in then counts little
                    counted = [_sent(network, side, np, model, steps, file.with_suffix("")) for steps in (FEWER, more)]
                    file.write_text(json.dumps((counted[1] - counted[0]) / (more - FEWER)))
    return {side: float(json.loads(file.read_text())) for side, file in files.items()}


def _sent(network: Network, side: str, np: int, model: str, steps: int, folder: Path) -> int:
    before = _payload(network)
    keys = [*SIDES[side].overrides(np, model), f"steps={steps}", "warmup_steps=1", f"log_every={steps}"]
    where = ["-H", network.hosts_option()]
    harness.train("pytorch", np, MODELS[model][0], keys, folder, where, start=network.run)
    return _payload(network) - before


def _payload(network: Network) -> int:
    """Bytes that all hosts have sent so far, without the headers of packets. Each packet is one of TCP."""
    shown = ["ip", "-json", "-stats", "link", "show", "eth0"]
    told = [network.run(shown, host, check=True, stdout=subprocess.PIPE).stdout for host in network.names]
    counted = [json.loads(text)[0]["stats64"]["tx"] for text in told]
    return sum(sent["bytes"] - HEADERS * sent["packets"] for sent in counted)


def counted_bytes(side: str, np: int, model: str) -> float | None:
    """What all ranks send in a step by closed forms, in float32 and without headers; None for a divided ResNet.

    A pipeline sends vectors forward and gradients back between neighbors, and the table's gradients between both ends.
    Tensor parallelism sums activations 4 times a layer and twice more, and four numbers of each target's loss.
    """
    recipe = SIDES[side].recipe(np, model)
    table = choose(recipe).architecture(counting.sample_shape(recipe))
    if not SIDES[side].divides:
        once = counting.gathered_once(table)
        return 4.0 * np * values_sent(parameter_count(table), np, recipe.sharding, once=once)
    if not isinstance(table, GPT):
        return None
    values = SAMPLES * table.context * table.width
    if side == "tensor":
        return np * ring_bytes(4.0 * ((4 * table.layers + 2) * values + 4 * SAMPLES * table.context), np)
    return 4.0 * (2 * (np - 1) * values + 2 * table.vocabulary * table.width)


def memory(side: str, np: int, model: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """MiB of the states of the rank with the most, of each stage's largest peak, and what `hvdkit memory` counts."""
    recipe = SIDES[side].recipe(np, model)
    shape, ranks = counting.sample_shape(recipe), recipe.data_ranks(np)
    stages = result.get("stages") or [result | {"peak_rss_mib": [result["peak_rss_mib"]]}]
    counted = [
        counting.parts_of_stage(recipe, shape, "pytorch", False, ranks, recipe.sharding, number)
        for number in range(len(stages))
    ]
    held = [stage["state_bytes"] for stage in stages]
    sums = [(sum(own.values()), sum(getattr(of, key) for key in own)) for own, of in zip(held, counted, strict=True)]
    own, wanted = max(sums)
    return {
        "state_mib": own / 2**20,
        "counted_state_mib": wanted / 2**20,
        "stage_peaks_mib": [max(stage["peak_rss_mib"]) for stage in stages],
        "counted_mib": [of.total / 2**20 for of in counted],
    }


def row(
    side: str,
    np: int,
    model: str,
    rounds: Sequence[Mapping[str, dict[str, Any]]],
    proof: dict[str, Any] | None,
    sent: float | None,
) -> dict[str, Any]:
    """The figures of a side: medians over the rounds, and ratios within them."""
    rival = SIDES[side].rival_of(model)
    named = f"{side}, {rival}"
    own, theirs, base = ([one[name] for one in rounds if name in one] for name in (side, named, BASE))

    def ratio(of: Sequence[Mapping[str, Any]], to: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return harness.interval([b["step_ms_p50"] / a["step_ms_p50"] for a, b in zip(of, to, strict=True)])

    def waited(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
        found = [one["bubble"] for one in runs if one["bubble"] is not None]
        return harness.median_and_range(found) if found else None

    return {
        "title": f"{np} ranks, {model if model.startswith('ResNet') else f'GPT of {model} parameters'}",
        "ranks": np,
        "model": model,
        "side": side,
        "parity": proof,
        **memory(side, np, model, own[0]),
        "sent_bytes": sent,
        "counted_bytes": counted_bytes(side, np, model),
        "rounds": len(own),
        "steps": MEASURED[model],
        "rival": rival if theirs else None,
        "step_ms": harness.median_and_range([one["step_ms_p50"] for one in own]),
        "as_fast_as_data": ratio(own, base),
        "as_fast_as_rival": ratio(own, theirs) if theirs else None,
        "bubble": waited(own),
        "rival_bubble": waited(theirs),
        "bubble_of_equal_passes": bubble(np, MICROBATCHES) if side in ("gpipe", "1f1b") else None,
        "peak_rss_mib": harness.median_and_range([one["peak_rss_mib"] for one in own]),
        "rival_peak_rss_mib": harness.median_and_range([one["peak_rss_mib"] for one in theirs]) if theirs else None,
    }


if __name__ == "__main__":
    harness.exit_with(main)
