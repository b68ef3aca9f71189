"""Whether a recipe is the same computation under several frameworks: in float64, step by step, against PyTorch.

The ranks measure (`hvdkit/worker/parity.py`). This module starts them, one framework after the other, and judges what
they have measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.table import Table

from hvdkit import paths, tasks
from hvdkit.adapters.capabilities import CAPABILITIES, dividing
from hvdkit.baselines import registry
from hvdkit.checkpoint.resume import deciding
from hvdkit.commands import dry_run, fields, own_script
from hvdkit.commands.checked_run import CheckedRun, launch, make_plan
from hvdkit.commands.loading import loaded
from hvdkit.commands.parity_verdict import missed, verdict
from hvdkit.commands.request import Option
from hvdkit.core.update_rules import rule_of
from hvdkit.defaults import PROFILED_RANKS, STEPS
from hvdkit.errors import Faults, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import Recipe
from hvdkit.report import csv_files
from hvdkit.report.parity import deviations, parity_markdown, parity_table, title
from hvdkit.report.progress import StageProgress
from hvdkit.report.tabular import terminal
from hvdkit.results.dry_run import DryRun
from hvdkit.results.machine import this_machine
from hvdkit.results.parity import MARKS, Parity
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.tasks.task import parameter_count
from hvdkit.worker.parity import NO_MEAN_OF_MICROBATCHES, SINGLE_BATCHES
from hvdkit.worker.parity_trace import ParityPart

# The reference: PyTorch under Horovod as its documentation shows it, without hvdkit's own optimizations.
REFERENCE, LEADER = "pytorch", ("pytorch", "plain")
MOST_STEPS = 100_000  # the weights of each stay on the disk until all frameworks have run


@dataclass(frozen=True)
class ParityPlan:
    """A parity run that has passed every check that can be made before it starts; `plans[0]` is the reference's."""

    recipe: Recipe
    plans: list[CheckedRun]
    steps: int
    names: list[str]  # of all that are judged: frameworks, and their rivals as in `registry.label`


class ParityRequest(fields.StartsRanks):
    """Check in float64, step by step, that frameworks compute what PyTorch computes.

    If one does not, `passed` of the result is false, which is no error.
    """

    recipe: fields.RecipeFile
    overrides: fields.Overrides = None
    framework: fields.Frameworks = None
    steps: Annotated[int, Option("steps to compare one by one"), Field(ge=1, le=MOST_STEPS)] = STEPS
    np: fields.Ranks = PROFILED_RANKS
    rival: fields.Rivals = None


def run(request: ParityRequest) -> Parity:
    """Run all, and judge. Raises as `proved` does."""
    checked, target = _checked(request)
    with (
        paths.claimed(target, request.overwrite, inputs=[checked.recipe.model.weights]) as folder,
        StageProgress("parity", len(checked.plans)) as progress,
    ):
        return proved(checked, folder, progress.begin)


def preview(request: ParityRequest) -> DryRun:
    """What would be started."""
    checked, target = _checked(request)
    paths.check_free(target, request.overwrite, inputs=[checked.recipe.model.weights])
    plans = [replace(plan, recipe=plan.recipe.model_copy(update={"steps": checked.steps})) for plan in checked.plans]
    described = dry_run.described("parity", checked.recipe, target, [(plan, 1) for plan in plans])
    for run in described.runs:  # ranks hold the model twice, in float64 and float32, and compute more than in training
        run.memory, run.seconds, run.seconds_from = None, None, "a step in float64 takes several times that of training"
    return described


def lines(request: ParityRequest, result: Parity) -> Iterator[str | Table]:
    """The errors of each framework, and where they begin."""
    yield terminal(parity_table(result), title(result), wrap_from=2)
    yield from deviations(result)
    verdict = "passed" if result.passed else "NOT PASSED"
    yield f"{verdict}; written to {result.folder / 'parity.json'}, .csv, .md and .png"


def status(result: Parity) -> int:
    """1 if a framework computes something else."""
    return int(not result.passed)


def _checked(request: ParityRequest) -> tuple[ParityPlan, Path]:
    recipe = loaded(request)
    frameworks = request.framework or able(recipe)
    checked = plan(recipe, frameworks, request.steps, Placement.of(request), request.rival)
    return checked, request.out or paths.default_out(recipe.name, "parity")


def plan(
    recipe: Recipe,
    frameworks: list[str],
    steps: int,
    placement: Placement,
    rival_names: list[str] | None = None,
) -> ParityPlan:
    """Check all runs: frameworks, and of the named rivals those that average gradients, where they fit.

    Raises RequestError with the faults of all of them.
    """
    named, np = rival_names or [], placement.np
    faults = Faults(registry.check(named, frameworks, [np]))
    for name in named:
        if name in registry.RIVALS and not registry.RIVALS[name].averaging:
            faults.append(f"--rival {name}: does not average gradients, so parity does not apply; leave it out")
    if recipe.model.name == "own" and (recipe.parallel.pipeline == 1 or set(frameworks) != {REFERENCE}):
        faults.append(
            "model own: parity needs the same model under every framework, as hvdkit has them; choose one "
            f"of their models, compare with --no-parity, or hold its stages to one process (--framework {REFERENCE}, "
            "parallel.pipeline=2)"
        )
    if recipe.data.name == "native":
        faults.append(
            "data native: parity needs the same bytes under every framework, which only hvdkit's own data sets give; "
            "choose one of them, or compare with --no-parity"
        )
    if recipe.parallel.pipeline > 1 and recipe.loss.counts:
        faults.append(f"loss: {NO_MEAN_OF_MICROBATCHES}; leave out loss.ignored_label and loss.class_weights")
    base = recipe.model_copy(update={"elastic": None, "early_stopping": None, "average_weights": None})
    wanted = [(*run, _precision(run[1]), False) for run in _judged(frameworks, named, np)]
    needed = ["fp64", *(["fp32"] if any(precision == "fp32" for _, _, precision, _ in wanted) else [])]
    wanted = [*((*LEADER, precision, recipe.parallel.divides) for precision in needed), *wanted]
    plans: list[CheckedRun] = []
    for framework, rival, precision, whole in dict.fromkeys(wanted):
        with faults.collected():
            sharding = base.sharding if rival is None else registry.sharding_in_parity(rival, base.sharding)
            changes: dict[str, object] = {"precision": precision, "sharding": sharding}
            where = placement
            if whole:  # of a model that the others divide: on each rank of the data axis
                changes["parallel"], where = Parallel(), replace(placement, np=recipe.data_ranks(np))
            plans.append(make_plan(base.model_copy(update=changes), framework, where, rival))
    faults.report()
    return ParityPlan(recipe, plans, steps, names(frameworks, named, np))


def able(recipe: Recipe) -> list[str]:
    """The frameworks that are taken without `--framework`: all, or those that divide models as the recipe does; for a
    script its own."""
    if recipe.model.name == "own":
        return [own_script.framework_for(recipe, None)]
    needed = set(dividing(recipe).values())
    return [name for name in FRAMEWORKS if needed <= CAPABILITIES[name]]


def _precision(rival: str | None) -> str:
    """The precision in which parity trains: float64 unless the rival has only float32."""
    return "fp64" if rival not in registry.RIVALS or "fp64" in registry.RIVALS[rival].precisions else "fp32"


def names(frameworks: list[str], rival_names: list[str], np: int) -> list[str]:
    """What parity has a verdict on: the frameworks, each followed by its rivals."""
    return [registry.label(framework, rival) for framework, rival in _judged(frameworks, rival_names, np)]


def _judged(frameworks: list[str], rival_names: list[str], np: int) -> list[tuple[str, str | None]]:
    return [
        (framework, rival)
        for framework in dict.fromkeys(frameworks)
        for rival in [None, *registry.fitting(rival_names, framework, np)]
    ]


def proved(plan: ParityPlan, folder: Path, on_start: Callable[[str], None] = lambda framework: None) -> Parity:
    """Run the reference, then the frameworks, and write parity.json, parity.md and parity.png into `folder`.

    `on_start` is called with each framework's name. The trace that the reference writes for the others takes one state
    of disk space a step and is removed at the end. Raises what the launcher raises, and RunError where the disk is too
    small for the trace.
    """
    _check_room(plan, folder)
    write_atomic(folder / "config.yaml", schema.dump(plan.recipe))
    trace = folder / "trace"
    trace.mkdir()
    try:
        content: dict[tuple[str, str], dict[str, Any]] = {}
        for run in plan.plans:
            name, precision = registry.label(run.framework, run.rival), run.recipe.precision
            title = name if precision == "fp64" else f"{name} in float32"
            on_start(title)
            part = ParityPart(trace, plan.steps, run is plan.plans[0], precision)
            leads = ["--leads"] if part.leads else []
            arguments = ["--parity", str(trace), "--steps", str(plan.steps), "--precision", precision, *leads]
            launch(run, folder / "config.yaml", arguments, folder / "logs" / title.replace(" ", "-"))
            content[name, precision] = json.loads(part.findings(name).read_text())
    finally:
        shutil.rmtree(trace, ignore_errors=True)
    findings = {name: content.get((name, "fp64")) or content[name, "fp32"] for name in plan.names}
    parity = judge(plan, findings, content.get((registry.label(*LEADER), "fp32")))
    parity.written(folder)
    csv_files.save(folder / "parity.csv", parity.records())
    write_atomic(folder / "parity.md", parity_markdown(parity))
    from hvdkit.report.parity import parity_plot

    parity_plot(parity, folder / "parity.png")
    return parity


def judge(
    plan: ParityPlan, findings: Mapping[str, Mapping[str, Any]], single: Mapping[str, Any] | None = None
) -> Parity:
    """Compare each framework's findings with the limits; `single` are those of the reference trained in float32."""
    frameworks = {name: verdict(finding, single) for name, finding in findings.items()}
    return Parity(
        passed=all(row.passed for row in frameworks.values()),
        reference=REFERENCE,
        recipe=plan.recipe.name,
        model=plan.recipe.model.name,
        optimizer=plan.recipe.optimizer.name,
        batch_size=plan.recipe.batch_size,
        np=plan.plans[-1].np,
        hosts=[place.hostname for place in plan.plans[-1].placement.places],
        steps=min(finding["steps"] for finding in findings.values()),
        seed=plan.recipe.seed,
        recipe_keys=_proved(plan.recipe),
        marks=MARKS,
        frameworks=frameworks,
        machine=this_machine(),
    )


def _check_room(plan: ParityPlan, folder: Path) -> None:
    slots = len(rule_of(plan.recipe.optimizer).slots)
    states, probes = (1 + slots) * (plan.steps + 1), min(plan.steps, SINGLE_BATCHES)
    needed = 8 * parameter_count(tasks.choose(plan.recipe).architecture()) * (states + probes)
    if needed > (free := shutil.disk_usage(folder).free):
        raise RunError(
            f"{folder}: up to {needed / 2**20:,.0f} MiB are needed for the states of {plan.steps} steps, "
            f"{free / 2**20:,.0f} MiB are free; free space, choose another --out or fewer --steps"
        )


def check(parity: Parity, path: Path, recipe: Recipe, frameworks: list[str]) -> None:
    """Check that an earlier result of parity is consistent, of this recipe and of all these frameworks.

    Raises RequestError naming the first fault.
    """
    mine, theirs = _proved(recipe), parity.recipe_keys
    known = theirs.keys() | {key for key in mine if not _has_default(recipe, key)}  # others are newer than the result
    different = [key for key in sorted(known) if mine.get(key) != theirs.get(key)]
    if different:
        key = different[0]
        raise RequestError(
            f"--parity {path}: expected a parity.json of this recipe; {key}: it has {theirs.get(key, 'nothing')}, the "
            f"recipe {mine.get(key, 'nothing')}"
        )
    missing = [name for name in frameworks if name not in parity.frameworks]
    if missing:
        raise RequestError(
            f"--parity {path}: expected {', '.join(frameworks)}, got no {', '.join(missing)}; run `hvdkit parity` again"
        )
    judged = parity.frameworks.values()
    sound = parity.marks == MARKS and parity.passed == all(row.passed for row in judged)
    if not sound or any(row.passed == bool(row.missed) or missed(row) != row.missed for row in judged):
        raise RequestError(
            f"--parity {path}: its verdict does not match its errors and limits; run `hvdkit parity` again"
        )


def _proved(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe that parity depends on: the number and size of batches do not change the program.

    Those of `parallel` are among them where it divides the model.
    """
    settings = {key: value for key, value in deciding(recipe).items() if key not in ("seed", "precision")}
    divided = schema.flat(recipe).items() if recipe.parallel.divides else ()
    axes = {key: value for key, value in divided if key.startswith("parallel.")}
    return settings | {"sharding": recipe.sharding} | axes


def _has_default(recipe: Recipe, key: str) -> bool:
    section, _, leaf = key.rpartition(".")
    model = getattr(recipe, section) if section else recipe
    return bool(getattr(model, leaf) == type(model).model_fields[leaf].default)
