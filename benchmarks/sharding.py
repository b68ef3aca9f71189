"""What sharding saves and costs: memory of each stage at four ranks, its speed at two, and what the simulator foresees.

    make bench-sharding        (or: .venv/bin/python -m benchmarks.sharding --rounds 7 --framework pytorch)

Speed: two ranks of one thread each train two GPTs; in one process a rank, the stages take turns of a few steps, in
random order in each round (`turns_rank.py`). A ratio is a stage's speed to that without sharding in the same round; the
page has their medians. The bytes are those that the loopback interface counts. Memory: the peak of the largest of two
to four ranks with GPT-2 and AdamW, on a context of 64 tokens and one sample a rank, beside what `hvdkit memory` counts;
other processes do not matter to it. Foreseen: steps of the larger GPT by `hvdkit predict`, from a profile
without sharding and the collectives of `hvdkit bench` on as many ranks.

What is done is kept in `runs/sharding` and not run again: give `--fresh` after a change of code. Writes sharding.json
and sharding.md beside itself, and docs/images/sharding.png; exit status 1 if a limit is missed and the interval leaves
no doubt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness, in_turns, written
from hvdkit.recipe import registry, schema
from hvdkit.results.profile import load as load_profile
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import memory as counting
from hvdkit.simulator import sharding
from hvdkit.simulator.calibration import calibrate
from hvdkit.simulator.predict import point
from hvdkit.simulator.settings import Settings
from hvdkit.tasks import choose
from hvdkit.tasks.task import parameter_count

# Overrides of `gpt-tiny`; how many steps of a turn are left out, and how many measured.
MODELS: dict[str, tuple[list[str], int, int]] = {
    "0.8 M": ([], 3, 12),
    "25 M": (["model={name: gpt, layers: 8, heads: 8, width: 512, context: 64, vocabulary: 256}"], 1, 3),
}
RECIPE, RANKS, ALWAYS = "gpt-tiny", 2, ["threads=1", "checkpoint=null", "data.validation=0.01"]
LIMITS = {"pytorch": 0.95}  # of stages `optimizer` and `gradients`
OTHER_LIMIT = 0.90
MEMORY_RANKS, MEMORY_STEPS = (2, 3, 4), 3
WHAT = ("speed", "memory", "foreseen")
FORESEEN, FORESEEN_RANKS = "25 M", {"pytorch": (2, 4)}  # of the other frameworks as many ranks as for speed
GPT2 = ["name=gpt2", "model={name: gpt, layers: 12, heads: 12, width: 768, context: 64, vocabulary: 50257}"]
COLLECTIVES = ("allreduce", "reducescatter", "allgather")
STEPS, PROFILES, SMALLEST = 24, 3, 4096
PARTS = ("framework", "parameters", "gathered", "gradients", "optimizer", "communication", "activations", "start")
PICTURE = harness.HERE.parent / "docs" / "images" / "sharding.png"


def main() -> int:
    """The command line; returns the exit status."""
    parser = harness.parser(__doc__, rounds=7, keep="sharding", frameworks=True)
    parser.add_argument("--what", choices=WHAT, action="append", help="only this, for now")
    args = parser.parse_args()
    keep = harness.kept(args)
    frameworks, what = args.framework or harness.FRAMEWORKS, args.what or WHAT
    for framework in frameworks if "speed" in what else ():
        for model in MODELS:
            take_turns(framework, model, RANKS, args.rounds, keep)
    for framework in frameworks if "foreseen" in what else ():
        for ranks in FORESEEN_RANKS.get(framework, (RANKS,)):
            harness.say(f"foreseen: {framework}, {ranks} ranks")
            take_turns(framework, FORESEEN, ranks, args.rounds, keep)
            foresee(framework, ranks, keep / f"foreseen-{framework}-{ranks}")
    for stage in sharding.STAGES if "memory" in what else ():
        for count in MEMORY_RANKS:
            peak(stage, count, keep)
    outcome = {
        "recipe": RECIPE,
        "ranks": RANKS,
        "turns": {model: {"left_out": each[1], "measured": each[2]} for model, each in MODELS.items()},
        "speed": [
            row for file in sorted(keep.glob(f"speed-{RANKS}-*.json")) for row in speeds(json.loads(file.read_text()))
        ],
        "memory": [
            memory_row(stage, count, keep)
            for count in MEMORY_RANKS
            for stage in sharding.STAGES
            if (memory_folder(stage, count, keep) / "result.json").exists()
        ],
        "foreseen_model": FORESEEN,
        "foreseen": foreseen(keep),
    }
    written.publish("sharding", outcome, args.out)
    if outcome["speed"] and outcome["memory"]:
        picture(outcome, PICTURE)
    return int(any(row["verdict"] == "missed" for row in outcome["speed"]))


def picture(outcome: Mapping[str, Any], path: Path) -> None:
    """Memory counted and measured by stage, and each stage's speed beside that without sharding."""
    ranks = max(row["ranks"] for row in outcome["memory"])
    memory = {
        row["stage"]: {"counted": (row["total_mib"],) * 3, "measured": (row["peak_rss_mib"],) * 3}
        for row in outcome["memory"]
        if row["ranks"] == ranks
    }
    speed: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in sorted(outcome["speed"], key=lambda row: row["model"]):
        if row["stage"] != "none":
            ratio = row["ratio"]["median"], row["ratio"]["low"], row["ratio"]["high"]
            speed.setdefault(f"{row['framework']}, {row['model']}", {})[row["stage"]] = ratio
    panels: list[tuple[str, str, harness.Rows]] = [(f"GPT-2, AdamW, fp32, {ranks} ranks", "MiB of a rank", memory)]
    written.dots(path, [*panels, ("two ranks on one machine", "tokens/s ÷ without sharding", speed)], one=1.0)


# -- speed ------------------------------------------------------------------------------------------------------------


def turns_file(framework: str, model: str, ranks: int, keep: Path) -> Path:
    """Where turns of the stages are kept."""
    return keep / f"speed-{ranks}-{framework}-{model.replace(' ', '')}.json"


def take_turns(framework: str, model: str, ranks: int, rounds: int, keep: Path) -> None:
    """Measure the stages of a framework, unless that is done."""
    file = turns_file(framework, model, ranks, keep)
    if file.exists():
        return
    keys, left_out, measured = MODELS[model]
    stages = sharding.supported(framework)
    sides = {stage: (keys + ALWAYS + [f"sharding={stage}"], left_out, measured) for stage in stages}
    harness.say(f"{framework}, {model}: {rounds} rounds of {', '.join(stages)}")
    keys = keys + ALWAYS
    found = in_turns.take_turns(None, ranks, framework, keys, sides, stages, rounds, keep / file.stem, RECIPE)
    file.write_text(json.dumps(found | {"framework": framework, "model": model, "turns": [left_out, measured]}))


def speeds(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each stage: milliseconds a step, the ratio of speeds, and bytes of a rank and step."""
    framework, model = found["framework"], found["model"]
    keys, left_out, measured = MODELS[model]
    ms = in_turns.turn_ms(found["rounds"])
    recipe = schema.load(registry.locate(Path(RECIPE)), keys)
    architecture = choose(recipe).architecture(None)
    count, once = parameter_count(architecture), counting.gathered_once(architecture)
    rows = []
    for stage in (each for each in sharding.STAGES if each in ms[0]):
        sent = [
            sum(hosts.values()) / RANKS / (left_out + measured)
            for order, counted in zip(found["rounds"], found["sent_bytes"], strict=True)
            for (side, _), hosts in zip(order, counted, strict=True)
            if side == stage
        ]
        ratio = harness.interval([each["none"] / each[stage] for each in ms])
        limit = LIMITS.get(framework, OTHER_LIMIT) if stage in ("optimizer", "gradients") else None
        rows.append(
            {
                "framework": framework,
                "version": found["versions"]["framework"],
                "model": model,
                "stage": stage,
                "step_ms": harness.median_and_range([each[stage] for each in ms]),
                "ratio": ratio,
                "limit": limit,
                "verdict": harness.judged(ratio, limit),
                "sent_bytes": harness.median_and_range(sent),
                "counted_bytes": 4 * sharding.values_sent(count, RANKS, stage, once=once),
                "load": found["load"],
            }
        )
    return rows


def foreseen(keep: Path) -> list[dict[str, Any]]:
    """Predicted steps beside measured ones."""
    found = []
    for framework in harness.FRAMEWORKS:
        for ranks in FORESEEN_RANKS.get(framework, (RANKS,)):
            folder, file = keep / f"foreseen-{framework}-{ranks}", turns_file(framework, FORESEEN, ranks, keep)
            if (folder / COLLECTIVES[-1] / "bench.json").exists() and file.exists():
                turns = in_turns.turn_ms(json.loads(file.read_text())["rounds"])
                found += foreseen_rows(framework, ranks, turns, folder)
    return found


# -- foreseen ---------------------------------------------------------------------------------------------------------


def foresee(framework: str, ranks: int, folder: Path) -> None:
    """Profile the recipe without sharding, and time the collectives by `hvdkit bench`, unless that is done."""
    where = ["--framework", framework, "-np", str(ranks), "--overwrite"]
    for number in range(PROFILES):
        place = folder / f"profile-{number}"
        if not (place / "profile.json").exists():
            out = ["--out", str(place), "--steps", str(STEPS)]
            harness.hvdkit(["profile", RECIPE, *where, *out, *MODELS[FORESEEN][0], *ALWAYS, "sharding=none"], 300.0)
    for before, collective in zip((None, *COLLECTIVES), COLLECTIVES, strict=False):
        if not (folder / collective / "bench.json").exists():
            adds = ["--add-to", str(folder / before / "cluster.yaml")] if before else []
            out = ["--out", str(folder / collective), "--min-bytes", str(SMALLEST), "--seconds", "1"]
            harness.hvdkit(["bench", collective, *where, *out, *adds], 300.0)


def foreseen_rows(
    framework: str, ranks: int, turns_ms: Sequence[Mapping[str, float]], folder: Path
) -> list[dict[str, Any]]:
    """A row for each stage that took turns, `turns_ms` by round: milliseconds a step, and relative to no sharding."""
    # Of several profiles the one with the median step, as the machine is not equally fast each minute.
    loaded = [load_profile(folder / f"profile-{number}" / "profile.json") for number in range(PROFILES)]
    loaded.sort(key=lambda each: each.step.step_ms.mean)
    found = calibrate(loaded[len(loaded) // 2])
    cluster = clusters.load(folder / COLLECTIVES[-1] / "cluster.yaml")
    stages = [stage for stage in sharding.STAGES if stage in turns_ms[0]]
    points = {stage: point(found, cluster, ranks, Settings(sharding=stage)) for stage in stages}
    made = []
    for stage, each in points.items():
        step, ratio = median(turn[stage] for turn in turns_ms), median(turn[stage] / turn["none"] for turn in turns_ms)
        foreseen = each.step_ms / points["none"].step_ms
        made.append(
            {
                "framework": framework,
                "ranks": ranks,
                "stage": stage,
                "step_ms": step,
                "predicted_ms": each.step_ms,
                "low_ms": each.low_ms,
                "high_ms": each.high_ms,
                "error_percent": 100 * (each.step_ms / step - 1),
                "ratio": ratio,
                "predicted_ratio": foreseen,
                "ratio_error_percent": 100 * (foreseen / ratio - 1),
            }
        )
    return made


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_keys(stage: str) -> list[str]:
    """Overrides of the recipe."""
    length = [f"steps={MEMORY_STEPS}", "batch_size=1", "schedule.warmup_epochs=0", "data.validation=0.0002"]
    return [*GPT2, *length, "threads=1", "check_ranks=0", "checkpoint=null", f"sharding={stage}"]


def memory_folder(stage: str, ranks: int, keep: Path) -> Path:
    """Where a run is kept."""
    return keep / f"memory-{ranks}-{stage}"


def peak(stage: str, ranks: int, keep: Path) -> None:
    """Train GPT-2 for a few steps, unless that is done."""
    folder = memory_folder(stage, ranks, keep)
    if not (folder / "result.json").exists():
        harness.say(f"memory: {stage}, {ranks} ranks")
        harness.train("pytorch", ranks, RECIPE, memory_keys(stage), folder)


def memory_row(stage: sharding.Stage, ranks: int, keep: Path) -> dict[str, Any]:
    """What `hvdkit memory` counts by part, and what was measured, in MiB."""
    recipe = schema.load(registry.locate(Path(RECIPE)), memory_keys(stage))
    parts = counting.parts(recipe, counting.sample_shape(recipe), "pytorch", False, ranks, stage)
    result = harness.result_of(memory_folder(stage, ranks, keep))
    return {
        "ranks": ranks,
        "stage": stage,
        "counted_mib": {name: (getattr(parts, name) or 0) / 2**20 for name in PARTS},
        "state_mib": {name: size / 2**20 for name, size in result["state_bytes"].items()},
        "total_mib": parts.total / 2**20,
        "peak_rss_mib": result["peak_rss_mib"],
        "parameters": result["parameters"],
    }


if __name__ == "__main__":
    harness.exit_with(main)
