"""The same recipe under several frameworks, numbers of ranks and rivals, in rounds, on the same machine."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hvdkit.baselines import registry
from hvdkit.commands import parity, train
from hvdkit.commands.parity import ParityPlan
from hvdkit.commands.plan import Plan, make_plan
from hvdkit.commands.regression import Baseline
from hvdkit.commands.train import Watch
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.recipe.schema import Recipe
from hvdkit.report.compare import comparison_markdown
from hvdkit.results import intervals
from hvdkit.results.compare import Comparison, Ratio
from hvdkit.results.machine import this_machine
from hvdkit.results.parity import Parity, read_parity
from hvdkit.results.train import TrainResult

PARITY_STEPS = 5  # of the short proof before a comparison
ROUNDS = 3  # where rivals are named; without any, one


@dataclass(frozen=True)
class Schedule:
    """All runs of a comparison: each of `plans` once in each round, in an order that `seed` shuffles anew each time.

    Neighbours in time share what the machine did at that time, and no plan always follows the same other one.
    """

    plans: list[Plan]
    rounds: int
    seed: int

    def __iter__(self) -> Iterator[tuple[int, Plan]]:
        for number in range(1, self.rounds + 1):
            shuffled = list(self.plans)
            if self.rounds > 1 or any(plan.rival for plan in self.plans):
                random.Random(f"{self.seed} {number}").shuffle(shuffled)
            for plan in shuffled:
                yield number, plan

    def name(self, number: int, plan: Plan) -> str:
        """A run's name within its comparison."""
        return name(plan) + (f"-round{number}" if self.rounds > 1 else "")


def plan(
    recipe: Recipe,
    frameworks: list[str],
    nps: list[int],
    launcher: str,
    stall_timeout_s: float = 60.0,
    rival_names: list[str] | None = None,
) -> list[Plan]:
    """All kinds of runs of a comparison, checked. Raises RequestError with the faults of all of them.

    Every rank of every run gets the same number of threads: the cores shared among as many ranks as the largest run
    has. Otherwise one rank alone would have all cores, and efficiency would say nothing about communication.
    """
    plans: list[Plan] = []
    named = rival_names or []
    faults: list[str] = []
    given = (("--framework", frameworks), ("-np", [str(np) for np in nps]), ("--rival", named))
    for option, values in given:
        for value, times in Counter(values).items():
            if times > 1:
                faults.append(f"{option} {value}: given {times} times; once is enough")
    faults += registry.check(named, frameworks, nps)
    recipe = recipe.model_copy(update={"checkpoint": None, "elastic": None})  # a comparison's runs are whole
    if recipe.threads == "auto" and nps:
        recipe = recipe.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // max(1, *nps))})
    for framework in frameworks:
        for np in nps:
            for rival in [None, *registry.fitting(named, framework, np)]:
                try:
                    each = make_plan(recipe, framework, np, None, launcher, stall_timeout_s, rival=rival)
                    plans.append(replace(each, pinned=True))
                except RequestError as error:
                    faults += [line for line in str(error).splitlines() if line not in faults]
    if faults:
        raise RequestError("\n".join(faults))
    return plans


def schedule(
    recipe: Recipe,
    frameworks: list[str],
    nps: list[int],
    launcher: str,
    stall_timeout_s: float = 60.0,
    rival_names: list[str] | None = None,
    rounds: int | None = None,
) -> Schedule:
    """All runs; without a number of rounds one, with rivals `ROUNDS`. Raises RequestError with all that is wrong."""
    faults = [f"--rounds {rounds}: expected 1 or more"] if rounds is not None and rounds < 1 else []
    plans: list[Plan] = []
    try:
        plans = plan(recipe, frameworks, nps, launcher, stall_timeout_s, rival_names)
    except RequestError as error:
        faults.append(str(error))
    if faults:
        raise RequestError("\n".join(faults))
    return Schedule(plans, rounds or (ROUNDS if rival_names else 1), recipe.seed)


def left_out(rival_names: list[str], frameworks: list[str], nps: list[int]) -> list[str]:
    """A line for each rival that some of the runs must do without."""
    lines = []
    for rival in rival_names:
        runs = [(framework, np) for framework in frameworks for np in nps]
        without = [f"{framework} at {np}" for framework, np in runs if not registry.fitting([rival], framework, np)]
        if without:
            lines.append(f"--rival {rival}: not for {', '.join(without)} rank(s)")
    return lines


@dataclass(frozen=True)
class Proof:
    """Where the proof comes from that all do the same work: a short parity run, a file, or nowhere."""

    plan: ParityPlan | None
    found: Parity | None

    @property
    def stages(self) -> int:
        """How many runs it takes."""
        return len(self.plan.plans) if self.plan else 0

    def give(self, folder: Path, tell: Callable[[str], None], resume: bool = False) -> Parity | None:
        """The proof. A run goes into `parity` below `folder`; `tell` hears each framework's name before it starts.

        With `resume` one that is there already serves again. Raises as `parity.run` does.
        """
        if self.plan is None:
            return self.found
        place = folder / "parity"
        if resume and (place / "parity.json").exists():
            found = read_parity(place / "parity.json")
            parity.check(found, place / "parity.json", self.plan.recipe, self.plan.names)
            return found
        shutil.rmtree(place, ignore_errors=True)  # half a proof is none
        place.mkdir()
        return parity.run(self.plan, place, tell)


def proof(
    recipe: Recipe,
    frameworks: list[str],
    file: Path | None,
    none: bool,
    launcher: str,
    stall_timeout_s: float = 60.0,
    rival_names: list[str] | None = None,
) -> Proof:
    """Plan the proof: `file` is an earlier one of the same recipe, `none` leaves it out.

    Raises RequestError where both are given, where the file is missing, damaged or no proof for this recipe, these
    frameworks and rivals, and as `parity.plan` does.
    """
    if none and file:
        raise RequestError("--parity, --no-parity: expected one of them, got both")
    if none:
        return Proof(None, None)
    named = [name for name in rival_names or [] if registry.RIVALS[name].averaging]
    if file is None:
        short = parity.short(recipe)
        return Proof(parity.plan(short, frameworks, PARITY_STEPS, 2, launcher, stall_timeout_s, named), None)
    found = read_parity(file)
    parity.check(found, file, recipe, parity.names(frameworks, named, found.np))
    return Proof(None, found)


def run(
    schedule: Schedule,
    shown: Parity | None,
    folder: Path,
    watch: Callable[[int, Plan], Watch | None] = lambda number, plan: None,
    baseline: Baseline | None = None,
    resume: bool = False,
) -> Comparison:
    """Run all rounds, each run into `runs/<name>` below `folder`, then write compare.json and compare.md there.

    `shown` is the proof that all do the same work, None where nobody asked for it. `watch` gives what sees a run's
    metric lines. With `resume` whole rounds that are there already are kept. Raises as `train.run` does; what ran
    before stays in its folder.
    """
    kept = _whole_rounds(schedule, folder) if resume else {}
    results: dict[tuple[int, str], TrainResult] = {}
    order = []
    for number, each in schedule:
        title = schedule.name(number, each)
        order.append(title)
        place = folder / "runs" / title
        if number in kept:
            results[number, name(each)] = kept[number][name(each)]
            continue
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        result = train.run(each, place, watch(number, each))
        result = result.model_copy(update={"round": number})
        write_atomic(place / "result.json", result.model_dump_json(indent=2) + "\n")
        results[number, name(each)] = result
    runs = [results[number, name(each)] for number in range(1, schedule.rounds + 1) for each in schedule.plans]
    comparison = Comparison(
        runs=runs,
        rounds=schedule.rounds,
        order_seed=schedule.seed,
        order=order,
        ratios=ratios(runs),
        baseline=baseline.rows(runs) if baseline else None,
        parity=shown,
        machine=this_machine(),
    )
    write_atomic(folder / "compare.json", comparison.model_dump_json(indent=2) + "\n")
    write_atomic(folder / "compare.md", comparison_markdown(comparison))
    return comparison


def _whole_rounds(schedule: Schedule, folder: Path) -> dict[int, dict[str, TrainResult]]:
    """The results of earlier rounds of which no run is missing: the runs of one round belong close together in time."""
    rounds: dict[int, dict[str, TrainResult]] = {}
    for number in range(1, schedule.rounds + 1):
        found = {}
        for each in schedule.plans:
            result = train.finished(each, folder / "runs" / schedule.name(number, each))
            if result is not None and result.round == number:
                found[name(each)] = result
        if len(found) == len(schedule.plans):
            rounds[number] = found
    return rounds


def ratios(runs: list[TrainResult]) -> list[Ratio]:
    """hvdkit against each rival, then against one rank, of each framework and number of ranks."""
    speeds: dict[tuple[str, int, str | None], dict[int, float]] = defaultdict(dict)
    for one in runs:
        speeds[one.framework, one.np, one.rival][one.round or 1] = one.images_per_second
    found: list[Ratio] = []
    for framework, np, rival in speeds:
        mine = speeds.get((framework, np, None))
        if rival is not None and mine:
            found += _ratio(framework, np, rival, mine, speeds[framework, np, rival], 1)
    for framework, np, rival in speeds:
        single = speeds.get((framework, 1, None))
        if rival is None and np > 1 and single:
            found += _ratio(framework, np, "np=1", speeds[framework, np, None], single, np)
    return found


def _ratio(
    framework: str, np: int, against: str, above: dict[int, float], below: dict[int, float], times: int
) -> list[Ratio]:
    """One ratio over the rounds that both sides have, `below` taken so many times; none without a round."""
    values = [above[number] / (times * below[number]) for number in above if below.get(number)]
    if not values:
        return []
    interval = intervals.of_values(values)
    return [
        Ratio(
            framework=framework,
            np=np,
            against=against,
            median=interval.median,
            low=interval.low,
            high=interval.high,
            rounds=len(values),
            confidence=intervals.confidence(len(values)),
            verdict=None if against == "np=1" else intervals.verdict(interval),
        )
    ]


def name(plan: Plan) -> str:
    """The name of a kind of run within its comparison."""
    return f"{plan.framework}-np{plan.np}" + (f"-{plan.rival}" if plan.rival else "")
