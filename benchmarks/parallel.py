"""A GPT that ranks divide, beside the same ranks with whole models, and beside PyTorch's own ways: parallel.json.

    .venv/bin/python -m benchmarks.parallel [--ranks 2] [--model 0.8M] [--side 1f1b] [--rounds 9] [--no-bytes]

First `hvdkit parity` holds each side in float64 against one process; then all sides of a round train directly after
each other in random order, one thread a rank. All have the same samples a step, so a ratio is one of steps' medians in
the same round. `bubble` is the share of a step in which a rank computes nothing, beside (p - 1) / (m + p - 1). Bytes
are what hosts' interfaces count in a run of more steps less those in a run of fewer, a rank on each host
(`hvdkit hosts`), where network namespaces can be made. Memory is the peak of the largest rank.

What is done is kept in `runs/parallel` and not run again: give `--fresh` after a change of code. Needs a quiet machine,
with a core for each rank. Writes parallel.json and parallel.md beside itself; exit status 1 if parity does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from hvdkit.core.schedules import bubble
from hvdkit.launch.namespaces import Network
from hvdkit.recipe import registry, schema
from hvdkit.simulator import memory as counting
from hvdkit.simulator.sharding import values_sent
from hvdkit.strategies.dense import ring_bytes
from hvdkit.tasks.gpt import GPT, architecture
from hvdkit.tasks.task import parameter_count

RECIPE, RANKS, SAMPLES, MICROBATCHES = "gpt-tiny", (2, 4), 16, 8
MODELS: dict[str, list[str]] = {
    "0.8M": [],
    "25M": ["model={name: gpt, layers: 8, heads: 8, width: 512, context: 64, vocabulary: 256}"],
}
WARMUP, MEASURED = 3, 12  # steps of a run
FEWER, MORE, MBIT_PER_S = 4, 12, 1000.0  # of bytes
ALWAYS = ["threads=1", "data.validation=0.01", "check_ranks=0", "schedule.warmup_epochs=0"]
PARITY_STEPS = 5
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
        return [*MODELS[model], *ALWAYS, f"batch_size={SAMPLES // (1 if self.divides else np)}", *keys]


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


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, rounds=9, keep="parallel")
    parser.add_argument("--ranks", type=int, choices=RANKS, action="append", help="only so many (may be repeated)")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--side", choices=SIDES, action="append", help=f"only this one, and {BASE}")
    parser.add_argument("--no-bytes", action="store_true", help="leave out what needs network namespaces")
    args = parser.parse_args()
    keep = harness.kept(args)
    names = [name for name in SIDES if name == BASE or name in (args.side or SIDES)]
    runs = [name for side in names for name in (side, f"{side}, {SIDES[side].rival}")]
    cells = {f"{np}-{model}": (np, model) for np in args.ranks or RANKS for model in args.model or MODELS}
    proofs = {cell: {side: proved(side, *of, keep) for side in names} for cell, of in cells.items()}
    rounds = harness.rounds(keep, cells, runs, args.rounds, partial(trained, cells))
    sent = {}
    for cell, (np, model) in cells.items() if not args.no_bytes else ():
        with Network(np, MBIT_PER_S) as network:
            sent[cell] = {side: measured_bytes(network, side, np, model, keep) for side in names}
    rows = [
        row(side, *of, rounds[cell], proofs[cell], sent.get(cell, {})) for cell, of in cells.items() for side in names
    ]
    every = [result for one in rounds.values() for done in one for result in done.values()]
    outcome = {
        "recipe": RECIPE,
        "samples": SAMPLES,
        "microbatches": MICROBATCHES,
        "rounds": args.rounds,
        "steps": MEASURED,
        "load": max(result["load"] for result in every),
        **{key: every[0][key] for key in ("framework", "framework_version", "horovod_version")},
        "rows": rows,
    }
    harness.publish("parallel", outcome, args.out)
    return int(not all(one["parity"]["passed"] for one in rows))


def proved(side: str, np: int, model: str, keep: Path) -> dict[str, Any]:
    """Whether a side and its rival compute the same, and the worst tensor's error over the steps, by name."""
    found, folder = SIDES[side], keep / f"parity-{np}-{model}-{side}"
    if not (folder / "parity.json").exists():
        harness.say(f"parity: {np} ranks, {model}, {side}")
        asked = ["--framework", "pytorch", "--rival", str(found.rival), "--steps", str(PARITY_STEPS)]
        where = ["-np", str(np), "--out", folder, "--overwrite"]
        try:
            harness.hvdkit(["parity", RECIPE, *asked, *where, *found.overrides(np, model)])
        except harness.RunError:  # not passed, or not run
            if not (folder / "parity.json").exists():
                raise
    judged = json.loads((folder / "parity.json").read_text())
    return {
        "passed": judged["passed"],
        "step_f64": {name: each["step_f64"] for name, each in judged["frameworks"].items()},
    }


def trained(cells: Mapping[str, tuple[int, str]], cell: str, _: int, run: str, folder: Path) -> dict[str, Any]:
    """Some steps of a side, or of its rival."""
    (np, model), (side, _, rival) = cells[cell], run.partition(", ")
    steps = WARMUP + MEASURED
    keys = [f"steps={steps}", f"warmup_steps={WARMUP}", f"log_every={steps}"]
    options = ["--rival", rival] if rival else []
    return harness.train("pytorch", np, RECIPE, [*SIDES[side].overrides(np, model), *keys], folder, options)


def measured_bytes(network: Network, side: str, np: int, model: str, keep: Path) -> float:
    """What all hosts send in a step, headers counted, on average over those by which one run is longer than another."""
    file = keep / f"bytes-{np}-{model}-{side}.json"
    if not file.exists():
        counted = []
        for steps in (FEWER, MORE):
            before = sum(network.sent_bytes().values())
            keys = [*SIDES[side].overrides(np, model), f"steps={steps}", "warmup_steps=1", f"log_every={MORE}"]
            where = ["-H", network.hosts_option()]
            harness.train("pytorch", np, RECIPE, keys, file.with_suffix(""), where, start=network.run)
            counted.append(sum(network.sent_bytes().values()) - before)
        file.write_text(json.dumps((counted[1] - counted[0]) / (MORE - FEWER)))
    return float(json.loads(file.read_text()))


def counted_bytes(side: str, np: int, model: str) -> float:
    """What all ranks send in a step by closed forms, in float32 and without headers.

    A pipeline sends vectors forward and gradients back between neighbors, and the table's gradients between both ends.
    Tensor parallelism sums activations 4 times a layer and twice more, and four numbers of each target's loss.
    """
    recipe = schema.load(registry.locate(Path(RECIPE)), MODELS[model])
    table = architecture(recipe.model)  # type: ignore[arg-type]
    assert isinstance(table, GPT)
    values = SAMPLES * table.context * table.width
    if side == "tensor":
        return np * ring_bytes(4.0 * ((4 * table.layers + 2) * values + 4 * SAMPLES * table.context), np)
    if SIDES[side].divides:
        return 4.0 * (2 * (np - 1) * values + 2 * table.vocabulary * table.width)
    stage = schema.load(registry.locate(Path(RECIPE)), SIDES[side].overrides(np, model)).sharding
    return 4.0 * np * values_sent(parameter_count(table), np, stage, once=counting.gathered_once(table))


def row(
    side: str,
    np: int,
    model: str,
    rounds: Sequence[Mapping[str, dict[str, Any]]],
    proofs: Mapping[str, dict[str, Any]],
    sent: Mapping[str, float],
) -> dict[str, Any]:
    """The figures of a side: medians over the rounds, and ratios within them."""
    rival = SIDES[side].rival
    own, theirs, base = ([one[name] for one in rounds] for name in (side, f"{side}, {rival}", BASE))

    def ratio(of: Sequence[Mapping[str, Any]], to: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return harness.interval([b["step_ms_p50"] / a["step_ms_p50"] for a, b in zip(of, to, strict=True)])

    def waited(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
        found = [one["bubble"] for one in runs if one["bubble"] is not None]
        return harness.median_and_range(found) if found else None

    return {
        "title": f"{np} ranks, {model} parameters",
        "ranks": np,
        "model": model,
        "side": side,
        "rival": rival,
        "parity": proofs[side],
        "step_ms": harness.median_and_range([one["step_ms_p50"] for one in own]),
        "as_fast_as_data": ratio(own, base),
        "as_fast_as_rival": ratio(own, theirs),
        "bubble": waited(own),
        "rival_bubble": waited(theirs),
        "bubble_of_equal_passes": bubble(np, MICROBATCHES) if side in ("gpipe", "1f1b") else None,
        "peak_rss_mib": harness.median_and_range([one["peak_rss_mib"] for one in own]),
        "rival_peak_rss_mib": harness.median_and_range([one["peak_rss_mib"] for one in theirs]),
        "state_mib": sum((own[0]["state_bytes"] or {}).values()) / 2**20,
        "sent_bytes": sent.get(side),
        "counted_bytes": counted_bytes(side, np, model),
    }


if __name__ == "__main__":
    harness.exit_with(main)
