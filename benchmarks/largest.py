"""The largest GPT that trains here with a limit on each rank's memory, whole and divided: largest.json.

    .venv/bin/python -m benchmarks.largest [--limit-gib 4] [--way alone]

Blocks of width 1,024 are added until the peak of a rank passes the limit: from the peaks of two small models, which
grow by the same for each block, to the number that they foresee, and on from there. All ways have the same samples a
step, AdamW and float32. Four ranks at the limit must fit into this machine.

What is done is kept in `runs/largest` and not run again. Speeds are of one run of few steps: they say that it trains,
no more. Writes largest.json and largest.md beside itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.errors import RunError
from hvdkit.files import write_atomic
from hvdkit.recipe import registry, schema
from hvdkit.simulator import memory as counting
from hvdkit.tasks import choose
from hvdkit.tasks.task import parameter_count

RECIPE, SAMPLES, WIDTH, STEPS, RUNS = "gpt-tiny", 4, 1024, 3, 12
FIRST = (4, 8)  # blocks of the models from which the size of one is taken
BY = 4  # blocks that are added at once, as many as there are stages at most
# Ranks, and keys of the recipe.
WAYS: dict[str, tuple[int, list[str]]] = {
    "alone": (1, []),
    "ZeRO-3": (4, ["sharding=parameters"]),
    "pipeline 4": (4, ["parallel.pipeline=4", "parallel.microbatches=4"]),
    "2 × 2": (4, ["parallel.pipeline=2", "parallel.tensor=2", "parallel.microbatches=4"]),
}


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, keep="largest")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--limit-gib", type=float, default=4.0, help="of each rank's peak (default 4)")
    args = parser.parse_args()
    keep, limit = harness.kept(args), 1024 * args.limit_gib
    rows = [largest(way, limit, keep) for way in args.way or WAYS]
    outcome = {"recipe": RECIPE, "limit_gib": args.limit_gib, "width": WIDTH, "samples": SAMPLES, "rows": rows}
    written.publish("largest", outcome, args.out)
    return 0


def largest(way: str, limit_mib: float, keep: Path) -> dict[str, Any]:
    """The model with the most blocks whose peak is within the limit."""
    done = {layers: trained(way, layers, keep) for layers in FIRST}
    first, second = (done[layers]["peak_rss_mib"] for layers in FIRST)
    grown = (second - first) / (FIRST[1] - FIRST[0])
    layers = _steps_of(FIRST[0] + (limit_mib - first) / grown)
    while len(done) < RUNS and layers not in done:
        done[layers] = trained(way, layers, keep)
        layers = max(BY, layers + (BY if done[layers]["peak_rss_mib"] <= limit_mib else -BY))
    fits = [number for number, found in done.items() if found["peak_rss_mib"] <= limit_mib]
    if not fits:
        raise RunError(f"{way}: not even {min(done)} blocks train within {limit_mib:.0f} MiB a rank")
    return {"way": way, "layers": max(fits), **done[max(fits)]}


def _steps_of(layers: float) -> int:
    return max(BY, BY * math.floor(layers / BY))


def overrides(way: str, layers: int) -> list[str]:
    """The recipe's keys; a data rank has its share of the samples."""
    np, keys = WAYS[way]
    model = f"model={{name: gpt, layers: {layers}, heads: 16, width: {WIDTH}, context: 64, vocabulary: 256}}"
    batch_size = SAMPLES if any(key.startswith("parallel.") for key in keys) else SAMPLES // np
    return [model, f"batch_size={batch_size}", "data.validation=0.01", "threads=1", "check_ranks=0", *keys]


def trained(way: str, layers: int, keep: Path) -> dict[str, Any]:
    """A few steps of a model of so many blocks."""
    file, np, keys = keep / f"{way}-{layers}.json", WAYS[way][0], overrides(way, layers)
    if not file.exists():
        more = [f"steps={STEPS}", "warmup_steps=1", f"log_every={STEPS}"]
        found = harness.train("pytorch", np, RECIPE, [*keys, *more], file.with_suffix(""))
        harness.say(f"{way}: {layers} blocks, {found['peak_rss_mib']:.0f} MiB a rank")
        recipe = schema.load(registry.locate(Path(RECIPE)), keys)
        shape = counting.sample_shape(recipe)
        counted = counting.parts(recipe, shape, "pytorch", False, recipe.data_ranks(np), recipe.sharding)
        kept = {
            "ranks": np,
            "parameters": parameter_count(choose(recipe).architecture(shape)),
            "peak_rss_mib": found["peak_rss_mib"],
            "counted_mib": counted.total / 2**20,
            "step_ms": found["step_ms_p50"],
            "load": found["load"],
        }
        write_atomic(file, json.dumps(kept))
    return dict(json.loads(file.read_text()))


if __name__ == "__main__":
    harness.exit_with(main)
