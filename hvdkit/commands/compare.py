"""The same recipe under several frameworks, numbers of ranks and baselines, in rounds, on the same machine."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hvdkit.baselines import registry
from hvdkit.commands import parity, train
from hvdkit.commands.parity import ParityPlan
from hvdkit.commands.plan import Plan, Watch, make_plan
from hvdkit.errors import Faults, RequestError
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe.schema import Recipe
from hvdkit.report import csv_files
from hvdkit.report.collect import Run
from hvdkit.report.compare import comparison_markdown
from hvdkit.report.rounds import Group, by_kind, paired
from hvdkit.results import intervals
from hvdkit.results.compare import BaselineRow, Comparison, Ratio, read_comparison
from hvdkit.results.machine import this_machine
from hvdkit.results.parity import Parity, read_parity
from hvdkit.results.train import TrainResult
from hvdkit.tracking import trackers as tracking
from hvdkit.tracking.trackers import Trackers

PARITY_STEPS = 5  # of the short parity check before a comparison
ROUNDS = 3  # with --rival; otherwise one


@dataclass(frozen=True)
class Schedule:
    """All runs of a comparison: each of `plans` once in each round, in an order that `seed` shuffles for each round.

    So all plans share what else the machine does over time, and none always follows the same other one.
    """

    plans: list[Plan]
    rounds: int
    seed: int

    @property
    def numbers(self) -> range:
        """The numbers of the rounds."""
        return range(1, self.rounds + 1)

    def __iter__(self) -> Iterator[tuple[int, Plan]]:
        for number in self.numbers:
            shuffled = list(self.plans)
            if self.rounds > 1 or any(plan.rival for plan in self.plans):
                random.Random(f"{self.seed} {number}").shuffle(shuffled)
            for plan in shuffled:
                yield number, plan

    def name(self, number: int, plan: Plan) -> str:
        """A run's name within its comparison."""
        return name(plan) + (f"-round{number}" if self.rounds > 1 else "")


def schedule(
    recipe: Recipe,
    frameworks: list[str],
    nps: list[int],
    placement: Placement,
    rival_names: list[str] | None = None,
    rounds: int | None = None,
) -> Schedule:
    """All runs of a comparison, checked; `rounds` defaults to 1, with baselines to `ROUNDS`.

    The numbers of ranks are `nps` in place of the placement's. Every rank of every run gets the same number of threads:
    the cores shared among as many ranks as the largest run has. Otherwise one rank alone would have all cores, and
    efficiency would say nothing about communication.

    Raises RequestError with the faults of all runs.
    """
    plans: list[Plan] = []
    named = rival_names or []
    faults = Faults([f"--rounds {rounds}: expected 1 or more"] if rounds is not None and rounds < 1 else [])
    for option, values in (("--framework", frameworks), ("-np", nps), ("--rival", named)):
        for value, times in Counter(map(str, values)).items():
            if times > 1:
                faults.append(f"{option} {value}: given {times} times; once is enough")
    faults += registry.check(named, frameworks, nps)
    # A comparison's runs are whole, and as long as each other.
    recipe = recipe.model_copy(update={"checkpoint": None, "elastic": None, "early_stopping": None})
    if recipe.threads == "auto" and nps:
        recipe = recipe.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // max(1, *nps))})
    for framework in frameworks:
        for np in nps:
            for rival in [None, *registry.fitting(named, framework, np)]:
                with faults.collected():
                    plan = make_plan(recipe, framework, replace(placement, np=np), rival)
                    plans.append(replace(plan, pinned=True))
    faults.report()
    return Schedule(plans, rounds or (ROUNDS if named else 1), recipe.seed)


def left_out(rival_names: list[str], frameworks: list[str], nps: list[int]) -> list[str]:
    """A line for each baseline that some of the runs do not have."""
    lines = []
    for rival in rival_names:
        runs = [(framework, np) for framework in frameworks for np in nps]
        without = [f"{framework} at {np}" for framework, np in runs if not registry.fitting([rival], framework, np)]
        if without:
            lines.append(f"--rival {rival}: not for {', '.join(without)} rank(s)")
    return lines


def proof(
    recipe: Recipe,
    frameworks: list[str],
    file: Path | None,
    skip: bool,
    placement: Placement,
    rival_names: list[str] | None = None,
) -> ParityPlan | Parity | None:
    """The parity check that all do the same work: a short run to make, or the result in `file`; None with `skip`.

    Raises RequestError if both are given, or if the file is missing, damaged or not of this recipe, these frameworks
    and baselines; and as `parity.plan` does.
    """
    if skip and file:
        raise RequestError("--parity, --no-parity: expected one of them, got both")
    if skip:
        return None
    named = [name for name in rival_names or [] if registry.RIVALS[name].averaging]
    if file is None:
        # Batches of at most 16 images are enough for it, and affordable in float64.
        short = recipe.model_copy(update={"batch_size": min(recipe.batch_size, 16)})
        return parity.plan(short, frameworks, PARITY_STEPS, replace(placement, np=2), named)
    proved = read_parity(file)
    parity.check(proved, file, recipe, parity.names(frameworks, named, proved.np))
    return proved


def prove(plan: ParityPlan, folder: Path, on_start: Callable[[str], None], resume: bool = False) -> Parity:
    """Check parity in the folder `parity` of `folder`, or with `resume` take its result. As `parity.run`."""
    target = folder / "parity"
    if resume and (target / "parity.json").exists():
        proved = read_parity(target / "parity.json")
        parity.check(proved, target / "parity.json", plan.recipe, plan.names)
        return proved
    shutil.rmtree(target, ignore_errors=True)  # of a run that was interrupted
    target.mkdir()
    return parity.run(plan, target, on_start)


@dataclass(frozen=True)
class Baseline:
    """An earlier comparison to compare with. A slowdown counts only beyond `margin`, a fraction."""

    old: Comparison
    margin: float

    def rows(self, runs: list[TrainResult]) -> list[BaselineRow]:
        """A row for each kind of run that both have."""
        old, rows = by_kind(map(Run, self.old.runs)), []
        for kind, group in by_kind(map(Run, runs)).items():
            if kind in old:
                now, before = (runs.values("images_per_second") for runs in (group, old[kind]))
                quotient = intervals.of_quotient(now, before)
                rows.append(
                    BaselineRow(
                        framework=group.framework,
                        np=group.np,
                        rival=group.rival,
                        **asdict(quotient),
                        rounds=len(now),
                        old_rounds=len(before),
                        margin=self.margin,
                        verdict=intervals.change(quotient, self.margin),
                    )
                )
        return rows


def earlier(path: Path, margin: float, recipe: Recipe, plans: list[Plan]) -> Baseline:
    """Check that the planned runs can be compared with those in `path`.

    Raises RequestError where the file is missing or damaged, is of another machine or recipe, has none of the planned
    runs, or the margin is not in [0, 1).
    """
    if not 0 <= margin < 1:
        raise RequestError(f"--margin {margin}: expected a fraction from 0 to below 1, such as 0.05")
    old = read_comparison(path)
    here = this_machine()
    for key in ("processor", "cores"):
        before, now = getattr(old.machine, key), getattr(here, key)
        if before != now:
            raise RequestError(
                f"--baseline {path}: expected this machine; {key}: the baseline has {before}, here are {now}"
            )
    wanted = {(plan.framework, plan.np, plan.rival) for plan in plans}
    common = [run for run in old.runs if Run(run).kind in wanted]
    if not common:
        has = ", ".join(f"{group.label} at {group.np} rank(s)" for group in by_kind(map(Run, old.runs)).values())
        raise RequestError(f"--baseline {path}: expected some of the runs that are asked for; it has {has}")
    # What must be equal for images per second to mean the same, by the keys of TrainResult.
    mine = {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "launcher": plans[0].placement.launcher,
        "threads": plans[0].recipe.threads,
        "batch_size": recipe.batch_size,
        "compression": str(recipe.compression),
        "optimizer": recipe.optimizer.name,
        "precision": recipe.precision,
        "accumulate": recipe.accumulate,
        "recompute": recipe.recompute,
        "sync": recipe.sync and recipe.sync.model_dump(),
        "allreduce": recipe.allreduce,
        "sharding": recipe.sharding,
    }
    for run in common:
        for key, value in mine.items():
            if value != getattr(run, key):
                raise RequestError(
                    f"--baseline {path}: expected the same recipe; {key}: the baseline has {getattr(run, key)}, this "
                    f"comparison {value}"
                )
    return Baseline(old, margin)


def run(
    schedule: Schedule,
    shown: Parity | None,
    folder: Path,
    watch: Callable[[int, Plan], Watch | None] = lambda number, plan: None,
    baseline: Baseline | None = None,
    resume: bool = False,
) -> Comparison:
    """Run all rounds, each run into `runs/<name>` below `folder`, then write compare.json and compare.md there.

    `shown` is the result of the parity check, None without one. `watch` returns the callback for a run's metric
    lines. With `resume` complete rounds that are there already are kept. Raises as `train.run` does; the folders of
    earlier runs stay.
    """
    results = _whole_rounds(schedule, folder) if resume else {}
    for number, plan in schedule:
        title = schedule.name(number, plan)
        run_folder = folder / "runs" / title
        if title not in results:
            shutil.rmtree(run_folder, ignore_errors=True)
            run_folder.mkdir(parents=True)
            result = train.run(plan, run_folder, watch(number, plan))
            results[title] = result.model_copy(update={"round": number})
            write_atomic(run_folder / "result.json", results[title].model_dump_json(indent=2) + "\n")
    runs = [results[schedule.name(number, plan)] for number in schedule.numbers for plan in schedule.plans]
    comparison = Comparison(
        runs=runs,
        rounds=schedule.rounds,
        order_seed=schedule.seed,
        order=[schedule.name(number, plan) for number, plan in schedule],
        ratios=ratios(runs),
        baseline=baseline.rows(runs) if baseline else None,
        parity=shown,
        machine=this_machine(),
    )
    write_atomic(folder / "compare.json", comparison.model_dump_json(indent=2) + "\n")
    csv_files.save(folder / "compare.csv", csv_files.comparison(comparison))
    write_atomic(folder / "compare.md", comparison_markdown(comparison))
    return comparison


def log(schedule: Schedule, folder: Path, names: list[str], say: Callable[[str], None]) -> None:
    """Log all runs to the named trackers, once nothing is measured any more. What fails is a warning by `say`."""
    for name in names:
        try:
            with Trackers([name], say) as trackers:
                for number, plan in schedule:
                    run_folder = folder / "runs" / schedule.name(number, plan)
                    trackers.begin(train.tracked(plan, run_folder, folder.name))
                    trackers.end("finished")
                if name in tracking.LIBRARIES:
                    say(f"{name}: {len(schedule.plans) * schedule.rounds} runs in the group {folder.name}")
        except RequestError as error:
            say(str(error))


def _whole_rounds(schedule: Schedule, folder: Path) -> dict[str, TrainResult]:
    """The results of complete earlier rounds: the runs of one round have to be close together in time."""
    kept: dict[str, TrainResult] = {}
    for number in schedule.numbers:
        titles = {schedule.name(number, plan): plan for plan in schedule.plans}
        results = {title: train.finished(plan, folder / "runs" / title) for title, plan in titles.items()}
        complete = {title: result for title, result in results.items() if result is not None and result.round == number}
        if len(complete) == len(titles):
            kept |= complete
    return kept


def ratios(runs: list[TrainResult]) -> list[Ratio]:
    """hvdkit's speed over each baseline's, then over one rank's, for each framework and number of ranks."""
    groups = by_kind(map(Run, runs))
    pairs: list[tuple[Group | None, Group | None, str]] = []
    for group in groups.values():
        if group.rival:
            pairs.append((groups.get((group.framework, group.np, None)), group, group.rival))
    for group in groups.values():
        if group.rival is None and group.np > 1:
            pairs.append((group, groups.get((group.framework, 1, None)), "np=1"))
    rows: list[Ratio] = []
    for above, below, against in pairs:
        values = [value / (above.np / below.np) for value in paired(above, below)] if above and below else []
        if above and values:
            interval = intervals.of_values(values)
            rows.append(
                Ratio(
                    framework=above.framework,
                    np=above.np,
                    against=against,
                    **asdict(interval),
                    rounds=len(values),
                    confidence=intervals.confidence(len(values)),
                    verdict=None if against == "np=1" else intervals.verdict(interval),
                )
            )
    return rows


def name(plan: Plan) -> str:
    """The name of a kind of run within its comparison."""
    return f"{plan.framework}-np{plan.np}" + (f"-{plan.rival}" if plan.rival else "")
