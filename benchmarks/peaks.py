"""The peaks of ranks on CPUs under PyTorch beside what `hvdkit memory` counts: peaks.json and peaks.md.

    .venv/bin/python -m benchmarks.peaks [--fresh]

Each run trains four steps, evaluates, and writes a checkpoint. Peaks of resident memory do not depend on what else the
machine does, but they differ from run to run. Constants of the count (`hvdkit/adapters/capabilities.py`) are fitted to
rows that are marked so. Runs that are done are kept in `runs/peaks`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.recipe import registry, schema
from hvdkit.recipe.schema import Recipe
from hvdkit.results.train import read_result
from hvdkit.simulator import memory as counting

FRAMEWORK = "pytorch"
ALWAYS = ["threads=1", "steps=4", "check_ranks=0"]


def gpt(layers: int, width: int, context: int, vocabulary: int, batch: int, *keys: str) -> list[str]:
    """A GPT on bytes of text, with a batch of each data rank."""
    size = f"layers: {layers}, heads: 4, width: {width}, context: {context}, vocabulary: {vocabulary}"
    return ["gpt-tiny", f"model={{name: gpt, {size}}}", "data.validation=0.01", f"batch_size={batch}", *keys]


def images(name: str, side: int, batch: int, *keys: str) -> list[str]:
    """A ResNet on random images."""
    sizes = [f"model.name={name}", f"data.height={side}", f"data.width={side}", "data.train_images=4096"]
    return ["resnet50-synthetic", *sizes, "data.val_images=16", f"batch_size={batch}", *keys]


TWO_STAGES = "parallel.pipeline=2", "parallel.microbatches=8"
GPIPE = (*TWO_STAGES, "parallel.schedule=gpipe")
PARTS = ("parallel.tensor=2",)
# Layers, width, context, vocabulary.
A, B, C = (8, 512, 128, 8192), (2, 1024, 64, 256), (4, 256, 256, 256)
D, E, F = (6, 256, 192, 1024), (3, 768, 96, 4096), (12, 128, 64, 256)
G = (5, 320, 80, 2048)

# Name -> what the count has of it, ranks, recipe and keys: its numbers are fitted to "fitted" rows alone, its form was
# chosen with those in sight that are "seen", and "new" ones were measured afterwards.
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "B, batch 16": ("fitted", 1, gpt(*B, 16)),
    "C, batch 8": ("fitted", 1, gpt(*C, 8)),
    "C, batch 32": ("fitted", 1, gpt(*C, 32)),
    "ResNet-20, 32 px, batch 256": ("fitted", 1, images("resnet20", 32, 256)),
    "ResNet-50, 64 px, batch 16": ("fitted", 1, images("resnet50", 64, 16)),
    "D, batch 8": ("seen", 1, gpt(*D, 8)),
    "D, batch 24": ("seen", 1, gpt(*D, 24)),
    "E, batch 16": ("seen", 1, gpt(*E, 16)),
    "F, batch 64": ("seen", 1, gpt(*F, 64)),
    "ResNet-18, 64 px, batch 32": ("seen", 1, images("resnet18", 64, 32)),
    "GPT-2, 64 tokens, batch 2": ("seen", 1, gpt(12, 768, 64, 50257, 2)),
    "C, batch 32, 2 stages": ("fitted", 2, gpt(*C, 32, *TWO_STAGES)),
    "C, batch 32, 2 data ranks": ("fitted", 2, gpt(*C, 32)),
    "B, batch 16, 2 stages": ("fitted", 2, gpt(*B, 16, *TWO_STAGES)),
    "B, batch 16, 2 parts": ("fitted", 2, gpt(*B, 16, *PARTS)),
    "D, batch 24, 2 stages": ("seen", 2, gpt(*D, 24, *TWO_STAGES)),
    "D, batch 24, 2 stages, gpipe": ("seen", 2, gpt(*D, 24, *GPIPE)),
    "D, batch 24, 2 parts": ("seen", 2, gpt(*D, 24, *PARTS)),
    "E, batch 16, 2 stages": ("seen", 2, gpt(*E, 16, *TWO_STAGES)),
    "E, batch 16, 2 data ranks": ("seen", 2, gpt(*E, 16)),
    "F, batch 64, 2 stages": ("seen", 2, gpt(*F, 64, *TWO_STAGES)),
    "A, batch 4": ("fitted", 1, gpt(*A, 4)),
    "A, batch 16, 2 stages": ("fitted", 2, gpt(*A, 16, *TWO_STAGES)),
    "ResNet-18, 64 px, batch 32, 2 data ranks": ("seen", 2, images("resnet18", 64, 32)),
    "G, batch 24": ("new", 1, gpt(*G, 24)),
    "G, batch 24, 2 stages": ("new", 2, gpt(*G, 24, *TWO_STAGES)),
    "G, batch 24, 2 parts": ("new", 2, gpt(*G, 24, *PARTS)),
    "D, batch 24, recompute": ("seen", 1, gpt(*D, 24, "recompute=true")),
    "D, batch 24, accumulate 2": ("new", 1, gpt(*D, 24, "accumulate=2")),
    "ResNet-34, 48 px, batch 24": ("new", 1, images("resnet34", 48, 24)),
    "G, batch 24, 2 data ranks": ("new", 2, gpt(*G, 24)),
    "C, batch 32, 2 stages, gpipe": ("new", 2, gpt(*C, 32, *GPIPE)),
}


def main() -> int:
    """The command line; returns the exit status."""
    args = harness.parser(__doc__, keep="peaks").parse_args()
    keep = harness.kept(args)
    for name, (_, ranks, (recipe, *keys)) in RUNS.items():
        folder = keep / name.replace(" ", "")
        if not (folder / "result.json").exists():
            harness.say(name)
            where = ["--framework", FRAMEWORK, "-np", str(ranks), "--out", folder, "--overwrite"]
            harness.hvdkit(["train", recipe, *where, *ALWAYS, *keys])
    rows = [row for name in RUNS for row in rows_of(name, keep / name.replace(" ", ""))]
    written.publish("peaks", {"framework": FRAMEWORK, "rows": rows}, args.out)
    return 0


def recipe_of(name: str) -> Recipe:
    """The recipe of a run."""
    recipe, *keys = RUNS[name][2]
    return schema.load(registry.locate(Path(recipe)), [*ALWAYS, *keys])


def rows_of(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A row of each stage of a run, of its largest rank."""
    result = read_result(folder / "result.json")
    peaks = [max(stage.peak_rss_mib) for stage in result.stages or []] or [result.peak_rss_mib]
    for number, peak in enumerate(peaks):
        yield {
            "name": name + (f": stage {number}" if len(peaks) > 1 else ""),
            "run": name,
            "stage": number,
            "row": RUNS[name][0],
            "peak_rss_mib": peak,
            "counted_mib": counted_mib(name, number),
            "measured": time.strftime("%-d %B %Y", time.gmtime((folder / "result.json").stat().st_mtime)),
        }


def counted_mib(name: str, stage: int) -> float:
    """What is counted for the run today."""
    recipe, ranks = recipe_of(name), RUNS[name][1]
    data = recipe.data_ranks(ranks)
    shape = counting.sample_shape(recipe)
    return counting.parts_of_stage(recipe, shape, FRAMEWORK, False, data, "none", stage).total / 2**20


if __name__ == "__main__":
    harness.exit_with(main)
