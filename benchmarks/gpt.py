"""How fast a GPT trains, beside the loops that one would write by hand: tokens per second and peak memory.

    make bench-gpt        (or: .venv/bin/python -m benchmarks.gpt --rounds 7 --framework pytorch)

A round runs all sides of a framework directly after each other, in random order, each rank with one thread: hvdkit's
recipe and `plain/gpt_<framework>.py` at one rank, and at two ranks hvdkit, that loop with Horovod, two processes
without a word between them and, for PyTorch, DistributedDataParallel. Ratios are of one round; the page has their
medians. Rounds that are done are kept in `runs/gpt` and not run again: give `--fresh` after a change of code. Writes
gpt.json and gpt.md beside itself; exit status 1 if a limit is missed and the interval leaves no doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from hvdkit.recipe import registry, schema

RECIPE, STEPS, WARMUP_STEPS = "gpt-tiny", 70, 10
HVDKIT, LOOP, HVDKIT_2, HOROVOD_2 = "hvdkit, 1 rank", "loop, 1 rank", "hvdkit, 2 ranks", "Horovod, 2 ranks"
DDP, INDEPENDENT = "DDP, 2 ranks", "2 processes apart"
SPEED, MEMORY = "tokens_per_second", "peak_rss_mib"


@dataclass(frozen=True)
class Mark:
    """hvdkit ÷ another side: at least `least` for speeds, at most `most` for memory; without either, just a figure."""

    what: str
    mine: str
    other: str
    least: float = 0.0
    most: float = 0.0

    @property
    def key(self) -> str:
        """The figure of a result that it compares."""
        return MEMORY if self.most else SPEED


MARKS = [
    Mark("tokens/s ÷ plain loop, 1 rank", HVDKIT, LOOP, least=0.98),
    Mark("tokens/s ÷ Horovod by hand, 2 ranks", HVDKIT_2, HOROVOD_2, least=1.10),
    Mark("tokens/s ÷ DDP, 2 ranks", HVDKIT_2, DDP, least=1.05),
    Mark("tokens/s ÷ two processes apart", HVDKIT_2, INDEPENDENT),
    Mark("memory ÷ plain loop, 1 rank", HVDKIT, LOOP, most=1.05),
    Mark("memory ÷ Horovod by hand, 2 ranks", HVDKIT_2, HOROVOD_2, most=1.05),
]


def main() -> int:
    """The command line; returns the exit status."""
    args = harness.parser(__doc__, rounds=7, keep="gpt", frameworks=True).parse_args()
    kept, found = harness.kept(args), {}
    frameworks = args.framework or harness.FRAMEWORKS
    for number in range(1, args.rounds + 1):  # the frameworks take turns, so that a noisy hour hits all of them
        for framework in frameworks:
            found[framework] = harness.rounds(kept, [framework], sides(framework), number, run)[framework]
    outcome = {
        "recipe": RECIPE,
        "steps": STEPS,
        "warmup_steps": WARMUP_STEPS,
        "frameworks": {framework: summary(rounds) for framework, rounds in found.items()},
    }
    harness.publish("gpt", outcome, args.out)
    return int(any(mark["verdict"] == "missed" for one in outcome["frameworks"].values() for mark in one["marks"]))


def sides(framework: str) -> list[str]:
    """What a framework is run as."""
    return [HVDKIT, LOOP, HVDKIT_2, HOROVOD_2, INDEPENDENT, *([DDP] if framework == "pytorch" else [])]


def run(framework: str, _: int, side: str, folder: Path) -> dict[str, Any]:
    """The result of one run."""
    ranks = 1 if side in (HVDKIT, LOOP) else 2
    if side in (LOOP, HOROVOD_2):
        return by_hand(framework, ranks, folder)
    rival = {DDP: "ddp", INDEPENDENT: "independent"}.get(side)
    keys = ["threads=1", f"steps={STEPS}", f"warmup_steps={WARMUP_STEPS}", "data.validation=0.01", "checkpoint=null"]
    harness.start_ranks(str(folder), framework, ranks, RECIPE, keys, rival=rival)
    return harness.result_of(folder)


def by_hand(framework: str, ranks: int, folder: Path) -> dict[str, Any]:
    """The result of a loop on the recipe's work."""
    recipe = schema.load(registry.locate(Path(RECIPE)))
    options = {name: getattr(recipe.model, name) for name in ("layers", "heads", "width", "context")}
    options |= {"batch-size": recipe.batch_size, "steps": STEPS, "warmup-steps": WARMUP_STEPS}
    return harness.by_hand(framework, "gpt", ranks, folder, options | ({"horovod": True} if ranks > 1 else {}))


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side, and each limit with hvdkit's ratio."""
    first = rounds[0][HVDKIT]
    return {
        "rounds": len(rounds),
        "sides": {
            side: {key: harness.median_and_range([one[side][key] for one in rounds]) for key in (SPEED, MEMORY)}
            for side in rounds[0]
        },
        "marks": [judged(mark, rounds) for mark in MARKS if mark.other in rounds[0]],
        **{key: first[key] for key in ("framework_version", "horovod_version", "hvdkit_version")},
    }


def judged(mark: Mark, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """hvdkit's ratio over the rounds and what it comes to; missed only if the whole interval misses the limit."""
    ratio = harness.interval([one[mark.mine][mark.key] / one[mark.other][mark.key] for one in rounds])
    by = [ratio[key] if mark.least else -ratio[key] for key in ("low", "median", "high")]
    if not mark.least and not mark.most:
        return {"what": mark.what, "limit": "–", "ratio": ratio, "verdict": "reported"}
    limit = mark.least or -mark.most
    worst, median, best = sorted(by)[0], by[1], sorted(by)[2]
    verdict = "met" if worst >= limit else "met by the median" if median >= limit else "in doubt"
    return {
        "what": mark.what,
        "limit": f"≥ {mark.least:.2f}" if mark.least else f"≤ {mark.most:.2f}",
        "ratio": ratio,
        "verdict": "missed" if best < limit else verdict,
    }


if __name__ == "__main__":
    harness.exit_with(main)
