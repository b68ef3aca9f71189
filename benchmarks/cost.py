"""What hvdkit costs over Horovod by hand: images per second and peak memory of both, side by side.

    make bench        (or: python benchmarks/cost.py --rounds 7 --framework pytorch)

A round runs `benchmarks/plain/<framework>.py` and hvdkit's recipe directly after each other, in random order, on two
ranks of one thread each, through the same launcher and environment, and gives one ratio of each figure. A machine
that others use too slows both sides of a round alike, so ratios are told and no absolute figures. Rounds that are
done are kept in `runs/cost` and not run again: give `--fresh` after a change of code. Exit status 1 where a mark is
missed beyond the doubt that the interval leaves.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratios import interval

from hvdkit import paths
from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.results.machine import this_machine
from hvdkit.runtimes.store import find

HERE = Path(__file__).resolve().parent
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
SIDES = ("plain", "hvdkit")
# Both sides get one thread a rank; TensorFlow does not read OpenMP's variable.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
RANKS, STEPS, WARMUP_STEPS, EPOCHS = 2, 70, 15, 4  # 22 steps an epoch: three whole ones and the start of a fourth
SPEED_MARK, MEMORY_MARK = 0.98, 1.05


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure what hvdkit costs over Horovod by hand.")
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of runs a framework (default 7)")
    parser.add_argument("--fresh", action="store_true", help="forget rounds that are done")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "cost", help="where runs are kept")
    args = parser.parse_args()
    frameworks = args.framework or list(FRAMEWORKS)
    if args.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {args.rounds}")
    keep = args.keep.absolute()
    if args.fresh and keep.exists():
        shutil.rmtree(keep)
    try:
        measure(frameworks, args.rounds, keep)
    except HvdkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    outcome = summary(frameworks, args.rounds, keep)
    page = markdown(outcome)
    write_atomic(HERE / "cost.json", json.dumps(outcome, indent=2) + "\n")
    write_atomic(HERE / "cost.md", page)
    print(page)
    return 1 if any(one["missed"] for one in outcome["frameworks"].values()) else 0


def measure(frameworks: list[str], rounds: int, keep: Path) -> None:
    """Run what is not there yet: round by round over all frameworks, so that a noisy hour hits all of them."""
    started, done, total = time.monotonic(), 0, len(frameworks) * rounds * len(SIDES)
    for number in range(rounds):
        for framework in frameworks:
            folder = keep / framework / f"{number:02d}"
            sides = list(SIDES)
            random.Random(f"{framework} {number}").shuffle(sides)
            if not all((folder / side / "result.json").exists() for side in SIDES):
                shutil.rmtree(folder, ignore_errors=True)  # half a round is none: its sides would be hours apart
                for side in sides:
                    run(framework, side, folder / side)
            done += len(SIDES)
            speed = {side: read(folder / side)["images_per_second"] for side in SIDES}
            print(
                f"[{done}/{total}, {time.monotonic() - started:.0f} s] round {number + 1} {framework}: hvdkit "
                f"{speed['hvdkit']:.0f}, plain {speed['plain']:.0f} images/s, ratio "
                f"{speed['hvdkit'] / speed['plain']:.3f}",
                flush=True,
            )


def run(framework: str, side: str, folder: Path) -> None:
    """One run, into `folder/result.json`."""
    folder.mkdir(parents=True)
    runtime = find(framework)
    if side == "plain":
        arguments = [str(HERE / "plain" / f"{framework}.py"), "--out", str(folder / "result.json")]
        arguments += ["--epochs", str(EPOCHS), "--steps", str(STEPS), "--warmup-steps", str(WARMUP_STEPS)]
    else:
        recipe = paths.recipes() / "resnet20-digits.yaml"
        arguments = [str(paths.script(framework)), str(recipe), "--out", str(folder), "threads=1"]
        arguments += [f"epochs={EPOCHS}", f"steps={STEPS}", f"warmup_steps={WARMUP_STEPS}"]
    job = Job(
        python=runtime.python,
        arguments=arguments,
        np=RANKS,
        hosts=[Host("localhost", RANKS)],
        environment=runtime.environment | ONE_THREAD,
        log_dir=folder / "logs",
    )
    LAUNCHERS["direct"](job)


def read(folder: Path) -> dict[str, Any]:
    """The result of one run."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def summary(frameworks: list[str], rounds: int, keep: Path) -> dict[str, Any]:
    """All ratios with their medians and intervals: what `cost.json` holds."""
    outcome: dict[str, Any] = {}
    for framework in frameworks:
        pairs = [{side: read(keep / framework / f"{number:02d}" / side) for side in SIDES} for number in range(rounds)]
        speed = ratio(pairs, "images_per_second")
        memory = ratio(pairs, "peak_rss_mib")
        missed = [
            *(["speed"] if speed["high"] < SPEED_MARK else []),
            *(["memory"] if memory["low"] > MEMORY_MARK else []),
        ]
        versions = {key: pairs[0]["hvdkit"][key] for key in ("framework_version", "horovod_version", "hvdkit_version")}
        outcome[framework] = {"speed": speed, "memory": memory, "missed": missed, "rounds": rounds, **versions}
    return {
        "command": " ".join(["python", "benchmarks/cost.py", *sys.argv[1:]]),
        "marks": {"speed_at_least": SPEED_MARK, "memory_at_most": MEMORY_MARK},
        "ranks": RANKS,
        "threads": 1,
        "steps": STEPS,
        "warmup_steps": WARMUP_STEPS,
        "frameworks": outcome,
        "machine": this_machine().model_dump(),
    }


def ratio(pairs: list[dict[str, dict[str, Any]]], key: str) -> dict[str, Any]:
    """hvdkit ÷ plain of each round, their median, and its 95 % interval by the percentile bootstrap."""
    return interval([pair["hvdkit"][key] / pair["plain"][key] for pair in pairs])


def markdown(outcome: dict[str, Any]) -> str:
    """`cost.md`."""
    return "\n".join(_lines(outcome)) + "\n"


def _lines(outcome: dict[str, Any]) -> Iterator[str]:
    machine = outcome["machine"]
    yield "# What hvdkit costs over Horovod by hand"
    yield ""
    yield (
        f"ResNet-20 on the digits, {outcome['ranks']} ranks of one thread, 32 images a rank; "
        f"{outcome['steps'] - outcome['warmup_steps']} of {outcome['steps']} steps measured. hvdkit ÷ plain: the "
        "median over the rounds and its 95 % bootstrap interval. Plain is `benchmarks/plain/<framework>.py` under "
        "Horovod's default settings; hvdkit is the recipe with its own defaults."
    )
    yield ""
    yield (
        f"Marks: images/s at least {outcome['marks']['speed_at_least']}, "
        f"peak memory at most {outcome['marks']['memory_at_most']}."
    )
    yield ""
    yield "| framework | images/s | interval | peak memory | interval | rounds | verdict |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for name, one in outcome["frameworks"].items():
        speed, memory = one["speed"], one["memory"]
        yield (
            f"| {name} {one['framework_version']} | {speed['median']:.3f} | {speed['low']:.3f}–{speed['high']:.3f} | "
            f"{memory['median']:.3f} | {memory['low']:.3f}–{memory['high']:.3f} | {one['rounds']} | {_verdict(one)} |"
        )
    yield ""
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_mib']} MiB, {machine['system']}; "
        f"Horovod {next(iter(outcome['frameworks'].values()))['horovod_version']}, Gloo. "
        f"Made by `{outcome['command']}`."
    )


def _verdict(one: dict[str, Any]) -> str:
    if one["missed"]:
        return "missed: " + ", ".join(one["missed"])
    met = one["speed"]["low"] >= SPEED_MARK and one["memory"]["high"] <= MEMORY_MARK
    if met:
        return "met"
    medians = one["speed"]["median"] >= SPEED_MARK and one["memory"]["median"] <= MEMORY_MARK
    return "met by the median, the interval leaves doubt" if medians else "in doubt: the median misses"


if __name__ == "__main__":
    sys.exit(main())
