"""The same recipe under several frameworks, numbers of ranks and rivals, in rounds, on the same machine or hosts."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.table import Table

from hvdkit import paths
from hvdkit.baselines import registry
from hvdkit.commands import dry_run, fields, parity, train
from hvdkit.commands.checked_run import CheckedRun, Watch, make_plan
from hvdkit.commands.loading import loaded
from hvdkit.commands.parity import ParityPlan
from hvdkit.commands.request import Option, say
from hvdkit.commands.run_order import RunOrder, log, whole_rounds
from hvdkit.core.group import MOST
from hvdkit.defaults import COMPARED_RANKS, MARGIN
from hvdkit.errors import Faults, RequestError
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe.schema import Recipe
from hvdkit.report import csv_files
from hvdkit.report.collect import Run
from hvdkit.report.compare import comparison_markdown, comparison_tables
from hvdkit.report.parity import deviations
from hvdkit.report.progress import RunProgress, StageProgress
from hvdkit.report.rounds import EarlierComparison, by_kind, ratios
from hvdkit.report.tabular import on_hosts
from hvdkit.results.compare import Comparison
from hvdkit.results.dry_run import DryRun
from hvdkit.results.machine import this_machine
from hvdkit.results.parity import Parity
from hvdkit.tracking import trackers as tracking

PARITY_STEPS = 5  # of the short parity check before a comparison
ROUNDS = 3  # with --rival; otherwise one


class CompareRequest(fields.StartsRanks):
    """Check that frameworks (all four, or those named) do the same work, train a recipe under each, on 1 and 2 ranks
    or as many as `np` says, and compare the results. Over several `hosts`, it is on one of them and on all.

    A check that does not pass, or a significant loss against an earlier comparison, is no error here: see
    `parity.passed` and the verdicts in `baseline`.
    """

    recipe: fields.RecipeFile
    overrides: fields.Overrides = None
    framework: fields.Frameworks = None
    np: Annotated[
        list[int] | None, Option("may be repeated", ("-np", "--np", "-n"), shown="1 and 2, or one host and all")
    ] = None
    parity: Annotated[Path | None, Option("the parity.json of an earlier `hvdkit parity`")] = None
    no_parity: Annotated[bool, Option("do not check that all do the same work")] = False
    rival: fields.Rivals = None
    rounds: Annotated[int | None, Option("number of runs of each kind", shown="1, with --rival 3"), Field(ge=1)] = None
    baseline: Annotated[
        Path | None, Option("the compare.json of an earlier `hvdkit compare`", ("--earlier",), old=("--baseline",))
    ] = None
    margin: Annotated[
        float,
        Option("a significant loss against --earlier of more than this gives status 1"),
        Field(ge=0, lt=1),
    ] = MARGIN
    debug: fields.Debug = False
    resume: Annotated[bool, Option("keep the whole rounds that are in --out")] = False
    log: fields.Log = None


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison that has passed every check that can be made before it starts."""

    recipe: Recipe
    schedule: RunOrder
    proof: ParityPlan | Parity | None
    baseline: EarlierComparison | None
    out: Path
    trackers: list[str]
    left_out: list[str]

    @property
    def largest(self) -> CheckedRun:
        """The run with the most ranks."""
        return max(self.schedule.plans, key=lambda plan: plan.np)


def run(request: CompareRequest) -> Comparison:
    """Run all rounds. Raises as `compared` does."""
    began = time.monotonic()
    plan = _checked(request)
    shown, inputs = plan.proof, [plan.recipe.model.weights, request.baseline, request.parity]
    with paths.claimed(plan.out, request.overwrite, request.resume, inputs) as folder:
        say([*plan.left_out, *plan.largest.warnings, *plan.largest.unreached])
        if isinstance(shown, ParityPlan):
            with StageProgress("parity", len(shown.plans), began) as stages:
                shown = prove(shown, folder, stages.begin, request.resume)
        runs = [(number, run.title, run.np) for number, run in plan.schedule]
        with RunProgress(runs, plan.recipe.steps is None, began) as progress:
            comparison = compared(
                plan.schedule,
                shown,
                folder,
                lambda number, run: progress.watch(run.title, number),
                plan.baseline,
                request.resume,
            )
        log(plan.schedule, folder, plan.trackers, lambda line: say([line]))
        return comparison


def preview(request: CompareRequest) -> DryRun:
    """What would be started."""
    plan = _checked(request)
    inputs = [plan.recipe.model.weights, request.baseline, request.parity]
    paths.check_free(plan.out, request.overwrite, request.resume, inputs)
    runs = [(run, plan.schedule.rounds) for run in plan.schedule.plans]
    described = dry_run.described("compare", plan.recipe, plan.out, runs, plan.largest.unreached)
    if isinstance(plan.proof, ParityPlan):
        described.notes.append(
            f"first a parity check of {plan.proof.steps} steps: {', '.join(plan.proof.names)} must compute the same"
        )
    return described


def lines(request: CompareRequest, result: Comparison) -> Iterator[str | Table]:
    """The runs, their ratios, and where frameworks deviate."""
    yield from comparison_tables(result)
    if result.parity:
        yield from deviations(result.parity)
    yield f"written to {result.folder / 'compare.json'}, .csv and .md"


def status(result: Comparison) -> int:
    """1 if the check of parity has not passed, or speed is lost against the earlier comparison."""
    lost = any(row.verdict == "worse" for row in result.baseline or [])
    return int(lost or bool(result.parity and not result.parity.passed))


def _checked(request: CompareRequest) -> ComparisonPlan:
    """Raises RequestError."""
    if request.margin != MARGIN and request.baseline is None:
        raise RequestError("--margin: expected --earlier with it")
    trackers = tracking.check(request.log or [])
    recipe = loaded(request, extra=tracking.overrides(trackers))
    names, rivals = request.framework or parity.able(recipe), request.rival or []
    nps = request.np or _ranks(Placement.of(request, 1))
    if request.resume and request.out is None:
        raise RequestError("--resume: expected --out with the comparison's folder")
    placement = Placement.of(request, max(nps))
    runs = schedule(recipe, names, nps, placement, rivals, request.rounds)
    shown = proof(recipe, names, request.parity, request.no_parity, placement, rivals)
    old = earlier(request.baseline, request.margin, recipe, runs.plans) if request.baseline else None
    out = request.out or paths.default_out(recipe.name, "compare")
    return ComparisonPlan(recipe, runs, shown, old, out, trackers, left_out(rivals, names, nps))


def _ranks(placement: Placement) -> list[int]:
    """The numbers of ranks that are compared without -np. Raises RequestError for wrong hosts."""
    hosts = placement.hosts
    return list(COMPARED_RANKS) if len(hosts) == 1 else [hosts[0].slots, sum(host.slots for host in hosts)]


def schedule(
    recipe: Recipe,
    frameworks: list[str],
    nps: list[int],
    placement: Placement,
    rival_names: list[str] | None = None,
    rounds: int | None = None,
) -> RunOrder:
    """All runs of a comparison, checked; `rounds` defaults to 1, with rivals to `ROUNDS`.

    The numbers of ranks are `nps` in place of the placement's. Every rank of every run gets the same number of threads:
    its host's cores shared among as many ranks as the host has in the largest run. Otherwise one rank alone would have
    all cores, and efficiency would say nothing about communication.

    Raises RequestError with the faults of all runs.
    """
    plans: list[CheckedRun] = []
    named = rival_names or []
    faults = Faults()
    for option, values in (("--framework", frameworks), ("-np", nps), ("--rival", named)):
        for value, times in Counter(map(str, values)).items():
            if times > 1:
                faults.append(f"{option} {value}: given {times} times; once is enough")
    faults += registry.check(named, frameworks, nps)
    # A comparison's runs are whole, and as long as each other.
    recipe = recipe.model_copy(update={"checkpoint": None, "elastic": None, "early_stopping": None})
    settings: dict[str, str] = {}
    if recipe.threads == "auto" and nps:
        with suppress(RequestError):  # a plan tells what is wrong with the hosts
            many = replace(placement, np=max(1, *nps))
            most = max(place.local_size for place in many.places)
            if len(many.hosts) == 1:
                recipe = recipe.model_copy(update={"threads": max(1, len(os.sched_getaffinity(0)) // most)})
            else:  # others may have more or fewer cores than this machine
                settings[MOST] = str(most)
    for framework in frameworks:
        for np in nps:
            for rival in [None, *registry.fitting(named, framework, np)]:
                with faults.collected():
                    plan = make_plan(recipe, framework, replace(placement, np=np), rival)
                    plans.append(replace(plan, pinned=True, settings=settings))
    faults.report()
    return RunOrder(plans, rounds or (ROUNDS if named else 1), recipe.seed)


def left_out(rival_names: list[str], frameworks: list[str], nps: list[int]) -> list[str]:
    """A line for each rival that some of the runs do not have."""
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
    and rivals; and as `parity.plan` does.
    """
    if skip and file:
        raise RequestError("--parity, --no-parity: expected one of them, got both")
    if skip:
        return None
    named = [name for name in rival_names or [] if registry.RIVALS[name].averaging]
    if file is None:
        axes = recipe.parallel
        # Batches of at most 16 images are enough for it, and affordable in float64; microbatches divide them.
        parts = 1 if axes.microbatches == "auto" else axes.microbatches
        short = recipe.model_copy(update={"batch_size": min(recipe.batch_size, parts * max(1, 16 // parts))})
        copies = 1 if axes.data == "auto" else axes.data
        return parity.plan(short, frameworks, PARITY_STEPS, replace(placement, np=max(2, copies * axes.model)), named)
    proved = Parity.read(file)
    parity.check(proved, file, recipe, parity.names(frameworks, named, proved.np))
    return proved


def prove(plan: ParityPlan, folder: Path, on_start: Callable[[str], None], resume: bool = False) -> Parity:
    """Check parity in the folder `parity` of `folder`, or with `resume` take its result. As `parity.proved`."""
    target = folder / "parity"
    if resume and (target / "parity.json").exists():
        proved = Parity.read(target / "parity.json")
        parity.check(proved, target / "parity.json", plan.recipe, plan.names)
        return proved
    shutil.rmtree(target, ignore_errors=True)  # of a run that was interrupted
    target.mkdir()
    return parity.proved(plan, target, on_start)


def earlier(path: Path, margin: float, recipe: Recipe, plans: list[CheckedRun]) -> EarlierComparison:
    """Check that the planned runs can be compared with those in `path`.

    Raises RequestError where the file is missing or damaged, is of another machine or recipe, or has none of the
    planned runs.
    """
    old = Comparison.read(path)
    here = this_machine()
    for key in ("processor", "cores"):
        before, now = getattr(old.machine, key), getattr(here, key)
        if before != now:
            raise RequestError(
                f"--earlier {path}: expected this machine; {key}: the earlier one has {before}, here are {now}"
            )
    wanted = {(plan.framework, plan.np, plan.rival) for plan in plans}
    common = [run for run in old.runs if Run(run).kind in wanted]
    if not common:
        has = ", ".join(f"{group.label} at {group.np} rank(s)" for group in by_kind(map(Run, old.runs)).values())
        raise RequestError(f"--earlier {path}: expected some of the runs that are asked for; it has {has}")
    # What must be equal for images per second to mean the same, by the keys of TrainResult.
    mine: dict[str, Any] = {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "launcher": plans[0].placement.launcher,
        "compression": str(recipe.compression),
        "optimizer": recipe.optimizer.name,
        "sync": recipe.sync and recipe.sync.model_dump(),
    }
    same = ("batch_size", "precision", "accumulate", "recompute", "allreduce", "sharding")
    mine |= {key: getattr(recipe, key) for key in same}
    if plans[0].recipe.threads != "auto":
        mine["threads"] = plans[0].recipe.threads
    places = {(plan.framework, plan.np): [place.hostname for place in plan.placement.places] for plan in plans}
    for run in common:
        hosts = places[run.framework, run.np]
        if run.rival is None and run.hosts and sorted(Counter(run.hosts).values()) != sorted(Counter(hosts).values()):
            raise RequestError(
                f"--earlier {path}: expected as many ranks on each host; the earlier one has {on_hosts(run.hosts)}, "
                f"this comparison {on_hosts(hosts)}"
            )
        for key, value in mine.items():
            if value != getattr(run, key):
                raise RequestError(
                    f"--earlier {path}: expected the same recipe; {key}: the earlier one has {getattr(run, key)}, this "
                    f"comparison {value}"
                )
    return EarlierComparison(old, margin)


def compared(
    schedule: RunOrder,
    shown: Parity | None,
    folder: Path,
    watch: Callable[[int, CheckedRun], Watch | None] = lambda number, plan: None,
    baseline: EarlierComparison | None = None,
    resume: bool = False,
) -> Comparison:
    """Run all rounds, each run into `runs/<name>` below `folder`, then write compare.json and compare.md there.

    `shown` is the result of the parity check, None without one. `watch` returns the callback for a run's metric
    lines. With `resume` complete rounds that are there already are kept. Raises as `train.trained` does; the folders of
    earlier runs stay.
    """
    results = whole_rounds(schedule, folder) if resume else {}
    for number, plan in schedule:
        title = schedule.name(number, plan)
        run_folder = folder / "runs" / title
        if title not in results:
            shutil.rmtree(run_folder, ignore_errors=True)
            run_folder.mkdir(parents=True)
            result = train.trained(plan, run_folder, watch(number, plan))
            results[title] = result.model_copy(update={"round": number}).written(run_folder)
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
    comparison.written(folder)
    csv_files.save(folder / "compare.csv", csv_files.comparison(comparison))
    write_atomic(folder / "compare.md", comparison_markdown(comparison))
    return comparison
