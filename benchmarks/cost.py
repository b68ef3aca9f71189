"""How fast hvdkit trains, beside what one would write by hand, DistributedDataParallel, and processes apart.

    make bench        (or: .venv/bin/python -m benchmarks.cost --rounds 9 --recipe gpt-tiny --framework pytorch)

A round runs all sides of a framework directly after each other, in random order, each rank with one thread: hvdkit's
recipe and the loop of `plain/` at one rank, and at two ranks hvdkit, that loop with this Horovod and with Horovod's
sockets alone (as its last release has it), two processes without a word between them and, for PyTorch,
DistributedDataParallel. Where there is no script by hand (ResNet-50) the plain side is `--rival plain`. Before, `hvdkit
parity` proves that the rivals compute the same. Ratios are of one round; the page has their medians. Rounds that are
done are kept in `runs/cost` and not run again: give `--fresh` after a change of code. Writes cost.json and cost.md
beside itself, where recipes that are not measured now stay, and so do frameworks that were measured on this machine
today; exit status 1 if a mark is missed and the interval leaves no doubt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.recipe import registry, schema
from hvdkit.runtimes.pins import FRAMEWORKS

HVDKIT_1, LOOP_1 = "hvdkit, 1 rank", "loop, 1 rank"
HVDKIT, HOROVOD, SOCKETS = "hvdkit, 2 ranks", "Horovod, 2 ranks", "Horovod over sockets, 2 ranks"
DDP, INDEPENDENT = "DDP, 2 ranks", "2 processes apart"
RIVALS = {DDP: "ddp", INDEPENDENT: "independent"}
MEMORY = "peak_rss_mib"
MOST_MEMORY = 1.05  # hvdkit's peak ÷ a loop's


@dataclass(frozen=True)
class Work:
    """A recipe with its `keys`, and which scripts of `plain/` do the same work, with their options.

    `least` has the marks: hvdkit's speed ÷ another side's.
    """

    recipe: str
    keys: tuple[str, ...]
    least: dict[str, float]
    script: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    speed: str = "images_per_second"

    def sides(self, framework: str) -> list[str]:
        """What a framework is run as."""
        alone = [HVDKIT_1, LOOP_1] if self.script else []
        rivals = [HOROVOD, SOCKETS, INDEPENDENT, *([DDP] if framework == "pytorch" else [])]
        return [*alone, HVDKIT, *rivals]


def works() -> dict[str, Work]:
    """What is trained, by the name of `--recipe`."""
    gpt = schema.load(registry.locate(Path("gpt-tiny")))
    options = {name: getattr(gpt.model, name) for name in ("layers", "heads", "width", "context")}
    found = [
        Work(
            "resnet20-digits",
            ("epochs=4", "steps=70", "warmup_steps=15"),  # 22 steps an epoch: three whole ones, the start of a fourth
            {LOOP_1: 1.0, HOROVOD: 1.2, DDP: 1.1, INDEPENDENT: 0.95},
            "resnet",
            {"epochs": 4, "steps": 70, "warmup-steps": 15},
        ),
        Work(
            "gpt-tiny",
            ("steps=70", "warmup_steps=10", "data.validation=0.01"),
            {LOOP_1: 1.0, HOROVOD: 1.2, DDP: 1.3, INDEPENDENT: 0.92},
            "gpt",
            options | {"batch-size": gpt.batch_size, "steps": 70, "warmup-steps": 10},
            "tokens_per_second",
        ),
        Work(
            "resnet50-synthetic",
            ("data.height=64", "data.width=64", "data.train_images=640", "data.val_images=32", "steps=20",
             "warmup_steps=3"),
            {HOROVOD: 1.2, DDP: 1.05, INDEPENDENT: 0.92},
        ),
    ]  # fmt: skip
    return {work.recipe: work for work in found}


def main() -> int:
    """The command line; returns the exit status."""
    known = works()
    parser = harness.parser(__doc__, rounds=9, keep="cost", frameworks=True)
    parser.add_argument("--recipe", action="append", choices=list(known), help="only this one (may be repeated)")
    args = parser.parse_args()
    kept, frameworks, found = harness.kept(args), args.framework or harness.FRAMEWORKS, {}
    for name in args.recipe or known:
        work = known[name]
        parity = proved(work, frameworks, kept / name / "parity")
        groups: dict[str, list[dict[str, Any]]] = {framework: [] for framework in frameworks}
        for number in range(args.rounds):  # the frameworks take turns, so that a noisy hour hits all of them
            for framework, rounds in groups.items():
                folder = kept / name / framework / f"{number:02d}"
                rounds.append(harness.one_round(folder, work.sides(framework), partial(run, work, framework)))
        summaries = {framework: summary(work, rounds) for framework, rounds in groups.items()}
        found[name] = {"unit": work.speed, "by_hand": bool(work.script), "keys": work.keys, "parity": parity}
        found[name] |= {"frameworks": summaries, **written.facts(written.command())}
    before = args.out / "cost.json"
    recipes = json.loads(before.read_text())["recipes"] if before.exists() else {}
    recipes |= {name: joined(recipes.get(name), result) for name, result in found.items()}
    written.publish("cost", {"ranks": 2, "threads": 1, "recipes": recipes}, args.out)
    marks = [mark for one in found.values() for each in one["frameworks"].values() for mark in each["marks"]]
    return int(any(mark["verdict"] == "missed" for mark in marks))


def joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """A recipe's result with the frameworks of an earlier one that were measured on the same machine and day."""
    same = ("keys", "measured", "machine")
    if before is None or any(before[key] != json.loads(json.dumps(now[key])) for key in same):
        return now
    both = before["frameworks"] | now["frameworks"]
    if both.keys() == now["frameworks"].keys():
        return now
    parities = before["parity"], now["parity"]
    return now | {
        "frameworks": {name: both[name] for name in FRAMEWORKS if name in both},
        "command": f"{before['command']}; {now['command']}",
        "parity": {
            "passed": all(parity["passed"] for parity in parities),
            "checked": sorted({name for parity in parities for name in parity["checked"]}),
            "worst_step_error_f64": max(parity["worst_step_error_f64"] for parity in parities),
        },
    }


def proved(work: Work, frameworks: list[str], folder: Path) -> dict[str, Any]:
    """That hvdkit and its rivals compute the same, by a parity check of two steps; kept in the folder.

    Raises RunError if they do not.
    """
    file = folder / "parity.json"
    if not file.exists():
        asked = [word for name in frameworks for word in ("--framework", name)]
        asked += ["--rival", "plain", *(["--rival", "ddp"] if "pytorch" in frameworks else [])]
        small = [] if work.script else ["batch_size=4"]
        harness.hvdkit(
            ["parity", work.recipe, *work.keys, *small, *asked, "--steps", "2", "--out", folder, "--overwrite"]
        )
    found = json.loads(file.read_text())
    worst = max(max(one["step_errors_f64"]) for one in found["frameworks"].values())
    return {"passed": found["passed"], "checked": list(found["frameworks"]), "worst_step_error_f64": worst}


def run(work: Work, framework: str, side: str, folder: Path) -> dict[str, Any]:
    """The result of one run."""
    ranks = 1 if side in (HVDKIT_1, LOOP_1) else 2
    environment = {"HOROVOD_SHARED_MEMORY": "0"} if side == SOCKETS else {}
    if work.script and side in (LOOP_1, HOROVOD, SOCKETS):
        options = work.options | ({"horovod": True} if ranks > 1 else {})
        return harness.by_hand(framework, work.script, ranks, folder, options, environment)
    rival = "plain" if side in (HOROVOD, SOCKETS) else RIVALS.get(side)
    keys = ["threads=1", "checkpoint=null", *work.keys]
    with harness.variables(environment):
        harness.start_ranks(str(folder), framework, ranks, work.recipe, keys, rival=rival)
    return harness.result_of(folder)


def summary(work: Work, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side, and hvdkit's ratios with their marks."""
    first, marks = rounds[0], []
    for other in first:
        mine = HVDKIT_1 if other == LOOP_1 else HVDKIT
        if other in (HVDKIT_1, HVDKIT):
            continue
        marks.append(judged(f"speed ÷ {other}", rounds, work.speed, mine, other, least=work.least.get(other)))
        if work.script and other in (LOOP_1, HOROVOD):
            marks.append(judged(f"memory ÷ {other}", rounds, MEMORY, mine, other, most=MOST_MEMORY))
    return {
        "rounds": len(rounds),
        "sides": {
            side: {
                key: harness.median_and_range([one[side][full] for one in rounds])
                for key, full in (("speed", work.speed), ("memory", MEMORY))
            }
            for side in first
        },
        "marks": marks,
        **{key: first[HVDKIT][key] for key in ("framework_version", "horovod_version", "hvdkit_version")},
    }


def judged(
    what: str,
    rounds: list[dict[str, Any]],
    key: str,
    mine: str,
    other: str,
    least: float | None = None,
    most: float | None = None,
) -> dict[str, Any]:
    """hvdkit's ratio over the rounds, and whether it meets its mark."""
    ratio = harness.interval([one[mine][key] / one[other][key] for one in rounds])
    mark = "–" if least is most is None else f"≤ {most:.2f}" if least is None else f"≥ {least:.2f}"
    return {"what": what, "mark": mark, "ratio": ratio, "verdict": harness.judged(ratio, least, most)}


if __name__ == "__main__":
    harness.exit_with(main)
