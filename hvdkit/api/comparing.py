"""Frameworks side by side: `compare` and `parity`."""

from __future__ import annotations

import operator
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit import paths
from hvdkit.api.calls import claimed, load_recipe, say, show_line
from hvdkit.arguments import AnyRecipe, Names, PathLike, Settings, Wholes, as_path, checked, listed, wholes
from hvdkit.defaults import COMPARED_RANKS, LAUNCHER, MARGIN, PROFILED_RANKS, STALL_TIMEOUT_S, STEPS
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.results.compare import Comparison
    from hvdkit.results.parity import Parity


@checked
def compare(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: Names = None,
    np: Wholes = None,
    parity: PathLike | None = None,
    no_parity: bool = False,
    rival: Names = None,
    rounds: int | None = None,
    baseline: PathLike | None = None,
    margin: float = MARGIN,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    debug: bool = False,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
    log: Names = None,
) -> Comparison:
    """Check that frameworks (all four, or those named) do the same work, train a recipe under each, on 1 and 2 ranks
    or as many as `np` says, and compare the results.

    A check that does not pass, or a significant loss against the baseline, is no error here: see `parity.passed` and
    the verdicts in `baseline`.
    """
    from hvdkit.commands import compare as compare_
    from hvdkit.commands.parity import ParityPlan
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import ComparisonProgress, StageProgress
    from hvdkit.runtimes.pins import FRAMEWORKS
    from hvdkit.tracking import trackers as tracking

    began = time.monotonic()
    trackers = tracking.check(listed(log))
    loaded = load_recipe(recipe, overrides, extra=tracking.overrides(trackers))
    names, rivals, nps = listed(framework) or list(FRAMEWORKS), listed(rival), wholes(np) or list(COMPARED_RANKS)
    if resume and out is None:
        raise RequestError("--resume: expected --out with the comparison's folder")
    placement = Placement(launcher=launcher, stall_timeout_s=stall_timeout, debug=debug)
    schedule = compare_.schedule(loaded, names, nps, placement, rivals, rounds)
    proof = compare_.proof(loaded, names, as_path(parity), no_parity, placement, rivals)
    old = compare_.earlier(Path(baseline), margin, loaded, schedule.plans) if baseline else None
    target = as_path(out) or paths.default_out(loaded.name, "compare")
    inputs = [loaded.model.weights, as_path(baseline), as_path(parity)]
    dry = ("of_comparison", loaded, schedule, proof, target)
    with claimed(target, overwrite, resume, inputs, dry) as folder:
        largest = max(schedule.plans, key=lambda plan: plan.np)
        say([*compare_.left_out(rivals, names, nps), *largest.warnings, *largest.unreached])
        if isinstance(proof, ParityPlan):
            with StageProgress("parity", len(proof.plans), began) as stages:
                proof = compare_.prove(proof, folder, stages.begin, resume)
        runs = [(number, plan.title, plan.np) for number, plan in schedule]
        with ComparisonProgress(runs, loaded.steps is None, began) as progress:
            comparison = compare_.run(
                schedule, proof, folder, lambda number, plan: progress.watch(plan.title, number), old, resume
            )
        compare_.log(schedule, folder, trackers, show_line)
        return comparison.at(folder)


@checked
def parity(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: Names = None,
    steps: int = STEPS,
    np: int = PROFILED_RANKS,
    rival: Names = None,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Parity:
    """Check in float64, step by step, that frameworks compute what PyTorch computes.

    If one does not, `passed` of the result is false, which is no error.
    """
    from hvdkit.commands import parity as parity_
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import StageProgress
    from hvdkit.runtimes.pins import FRAMEWORKS

    loaded = load_recipe(recipe, overrides)
    placement = Placement(operator.index(np), launcher=launcher, stall_timeout_s=stall_timeout)
    plan = parity_.plan(loaded, listed(framework) or list(FRAMEWORKS), steps, placement, listed(rival))
    target = as_path(out) or paths.default_out(loaded.name, "parity")
    with (
        claimed(target, overwrite, inputs=[loaded.model.weights], dry=("of_parity", plan, target)) as folder,
        StageProgress("parity", len(plan.plans)) as progress,
    ):
        return parity_.run(plan, folder, progress.begin).at(folder)
