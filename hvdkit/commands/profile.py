"""Where the time of a recipe's steps goes: a short profiled run, and profile.json, trace.json and a picture of it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.table import Table

from hvdkit import paths
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.commands import dry_run, fields
from hvdkit.commands.checked_run import CheckedRun, launch, make_plan
from hvdkit.commands.loading import loaded
from hvdkit.commands.request import Accepts, Argument, Option, say
from hvdkit.defaults import FRAMEWORK, PROFILED_RANKS, STEPS
from hvdkit.errors import Faults, RequestError
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.profiling import assemble, batch_curves, chrome_trace
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.report import csv_files
from hvdkit.report.profile import sentences, tables
from hvdkit.results.dry_run import DryRun
from hvdkit.results.pipeline import PipelineStep
from hvdkit.results.profile import Profile, save
from hvdkit.worker.profile import LEAST_STEPS, turns

FILE, TRACE, PICTURE = "profile.json", "trace.json", "profile.png"
GANTT = "pipeline.png", "pipeline.svg"
# With it Horovod's timeline can be started and stopped during a run.
_SETTINGS = {"HOROVOD_TIMELINE": "DYNAMIC"}
_LONGEST_ROUND = 1000  # updates between two synchronizations; a profile takes at least four rounds

_MOST_BATCHES = 10
INSTEAD = "published_profile"  # the command that `hvdkit profile` is with the options of that one
MOST_STEPS = 100_000  # the trace events of each stay in memory until the end


@dataclass(frozen=True)
class ProfilePlan:
    """A profile that has passed every check that can be made before it starts.

    `given` is the recipe as it was given; `left_out` has a line for each part of it that is not profiled. `others` are
    the plans of further batch sizes, of which only compute is kept.
    """

    given: Recipe
    left_out: list[str]
    plan: CheckedRun
    steps: int
    own_profile: bool
    others: tuple[CheckedRun, ...] = ()


def _batch_sizes(name: str, given: Any) -> Any:
    """Several whole numbers, which the command line has in one text."""
    if not isinstance(given, str):
        return [given] if hasattr(given, "__index__") else [operator.index(size) for size in given]
    try:
        return [int(word) for word in given.split(",")]
    except ValueError:
        raise RequestError(
            f"--batch-sizes {given}: expected whole numbers with commas between them, such as 8,16"
        ) from None


class ProfileRequest(fields.StartsRanks):
    """Measure where the time of a step goes, by layer and by rank.

    `batch_sizes` also measures compute at these, so that `predict` knows which part of it does not depend on them.
    """

    recipe: Annotated[
        Path | dict[str, Any],
        fields.OF_RECIPES,
        Argument(
            "the recipe, or --from instead",
            metavar="RECIPE.yaml",
            missing="expected a recipe to measure, or --from with a published figure",
        ),
    ]
    overrides: fields.Overrides = None
    framework: fields.Framework = FRAMEWORK
    np: fields.Ranks = PROFILED_RANKS
    steps: Annotated[int, Option("steps to measure"), Field(ge=LEAST_STEPS, le=MOST_STEPS)] = STEPS
    torch_profiler: Annotated[bool, Option("write PyTorch's own profile too")] = False
    batch_sizes: Annotated[
        list[int] | None,
        Accepts("Wholes", "a whole number, or a list of them", _batch_sizes, str),
        Option("measure compute at these batch sizes too", metavar="8,16,32", shown="the recipe's"),
    ] = None
    debug: fields.Debug = False


def run(request: ProfileRequest) -> Profile:
    """Measure. Raises what the launcher raises, RunError where a file cannot be written or nothing was measured."""
    checked, target = _checked(request)
    with paths.claimed(target, request.overwrite, inputs=[checked.given.model.weights]) as folder:
        say([*checked.left_out, *checked.plan.warnings])
        return measured(checked, folder).at(folder)


def preview(request: ProfileRequest) -> DryRun:
    """What would be started: the steps that are measured, and those before and between them."""
    checked, target = _checked(request)
    paths.check_free(target, request.overwrite, inputs=[checked.given.model.weights])
    recipe = checked.plan.recipe
    every = recipe.sync.every if recipe.sync else 1
    described = dry_run.described("profile", checked.given, target, [(checked.plan, 1)], checked.left_out)
    only = described.runs[0]
    only.steps = sum(turn.steps for turn in turns(checked.steps, recipe.warmup_steps, every))
    only.epochs, only.seconds, only.seconds_from = None, None, "profiled steps take longer than others"
    return described


def lines(request: ProfileRequest, result: Profile) -> Iterator[str | Table]:
    """Where the time goes, and what bounds the step."""
    yield from tables(result)
    yield from sentences(result)
    files = [TRACE, PICTURE]
    if (step := result.folder / PipelineStep.FILE).exists():
        from hvdkit.report import pipeline

        yield from pipeline.sentences(PipelineStep.read(step))
        files += [PipelineStep.FILE, *GANTT]
    yield f"written to {result.folder / FILE}, {', '.join(files[:-1])} and {files[-1]}"


def _checked(request: ProfileRequest) -> tuple[ProfilePlan, Path]:
    recipe = loaded(request)
    sizes = request.batch_sizes or []
    checked = plan(recipe, request.framework, Placement.of(request), request.steps, request.torch_profiler, sizes)
    return checked, request.out or paths.default_out(recipe.name, "profile")


def plan(
    recipe: Recipe,
    framework: str,
    placement: Placement,
    steps: int = 20,
    own_profile: bool = False,
    batch_sizes: Sequence[int] = (),
) -> ProfilePlan:
    """Check what was asked for. Raises RequestError with all its faults.

    With `batch_sizes`, the profile is of the recipe's batch size if it is among them, else of the largest.
    """
    faults = Faults()
    if len(set(batch_sizes)) != len(batch_sizes) or len(batch_sizes) == 1 or len(batch_sizes) > _MOST_BATCHES:
        given = ",".join(map(str, batch_sizes))
        faults.append(f"--batch-sizes {given}: expected 2 to {_MOST_BATCHES} sizes, each once, such as 8,16,32")
    if any(size < 1 for size in batch_sizes):
        faults.append(f"--batch-sizes: expected at least 1, got {min(batch_sizes)}")
    faults.report()
    if batch_sizes and recipe.batch_size not in batch_sizes:
        recipe = recipe.model_copy(update={"batch_size": max(batch_sizes)})
    if own_profile and "own-profile" not in CAPABILITIES.get(framework, frozenset()):
        faults.append(f"--torch-profiler: {framework} has none; leave it out or choose --framework pytorch")
    sync = recipe.sync
    if sync is not None and sync.every > _LONGEST_ROUND:
        faults.append(f"sync.every: expected at most {_LONGEST_ROUND} to profile whole rounds, got {sync.every}")
    still, left_out = _steady(recipe)
    if sync is not None and steps % sync.every:
        rounded = sync.every * -(-steps // sync.every)
        left_out.append(f"--steps {steps}: measured are whole rounds of sync.every {sync.every}, {rounded} steps")
    with faults.collected():
        sizes = [recipe.batch_size, *(size for size in sorted(batch_sizes) if size != recipe.batch_size)]
        plans = [make_plan(still.model_copy(update={"batch_size": size}), framework, placement) for size in sizes]
    faults.report()
    first, *others = (replace(plan, settings={**plan.settings, **_SETTINGS}) for plan in plans)
    return ProfilePlan(recipe, left_out, first, steps, own_profile, tuple(others))


def _steady(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe in its steady state, without checkpoints or evaluation; and a line for each part that is left out."""
    changes: dict[str, Any] = {"elastic": None, "checkpoint": None, "early_stopping": None, "tensorboard": False}
    left_out, sync = [], recipe.sync
    if recipe.parallel.tensor > 1:
        left_out.append(
            "parallel.tensor: sums over the parts of layers count to forward and backward, which wait for them"
        )
    if recipe.elastic is not None:
        left_out.append("elastic: what it costs is not profiled; the steps are those of a run whose ranks stay")
    if recipe.order == "priority":
        changes["order"] = "none"
        left_out.append(
            "order: profiled are steps without it, whose layers wait for no update; predict --policy priority"
        )
    if sync is not None and sync.start:
        changes["sync"] = sync.model_copy(update={"start": 0.0})
        left_out.append(f"sync.start: profiled are steps after epoch {sync.start:g}; for those before, leave out sync")
    if getattr(recipe.compression, "warmup_epochs", 0):
        changes["compression"] = recipe.compression.model_copy(update={"warmup_epochs": 0})
        left_out.append("compression.warmup_epochs: profiled are steps after the warm-up, at the recipe's own ratio")
    return recipe.model_copy(update=changes), left_out


def measured(plan: ProfilePlan, folder: Path) -> Profile:
    """Run and measure; writes profile.json, trace.json and profile.png into `folder`, beside what they are made from.

    Raises what the launcher raises, RunError where a file cannot be written or nothing was measured.
    """
    findings = _measured(plan, plan.plan, folder)
    profile = assemble.profile(findings, plan.given)
    if plan.others:
        profile = batch_curves.combined(profile, _others(plan, folder))
    write(profile, folder)
    write_atomic(folder / TRACE, chrome_trace.dump(findings))
    from hvdkit.report.profile import picture

    picture(profile, findings, folder / PICTURE)
    if plan.given.parallel.pipeline > 1:
        from hvdkit.profiling import pipeline  # most models are in one piece
        from hvdkit.report import pipeline as of_pipeline

        step = pipeline.measured(findings, plan.given).written(folder)
        of_pipeline.picture(step, *(folder / name for name in GANTT))
    return profile


def _measured(plan: ProfilePlan, run: CheckedRun, folder: Path) -> assemble.Findings:
    """One profiled run."""
    folder.mkdir(exist_ok=True)
    write_atomic(folder / "config.yaml", schema.dump(run.recipe))
    own = ["--own-profile"] if plan.own_profile else []
    arguments = ["--profile", str(folder), "--steps", str(plan.steps), *own]
    launch(run, folder / "config.yaml", arguments, folder / "logs")
    return assemble.read(folder, plan.given)


def _others(plan: ProfilePlan, folder: Path) -> list[Profile]:
    """Profiles of the other batch sizes, each from a run of its own in a folder below."""
    profiles = []
    for other in plan.others:
        size = other.recipe.batch_size
        run = _measured(plan, other, folder / f"batch-{size}")
        profiles.append(assemble.profile(run, plan.given.model_copy(update={"batch_size": size})))
    return profiles


def write(profile: Profile, folder: Path) -> Profile:
    """Write profile.json and profile.csv into `folder`. Raises RunError if they cannot be written."""
    save(profile, folder / FILE)
    csv_files.save(folder / "profile.csv", csv_files.profile(profile))
    return profile
