"""Where the time of a recipe's steps goes: a short profiled run, and profile.json, trace.json and a picture of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.commands.plan import Plan, launch, make_plan
from hvdkit.errors import Faults
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.profiling import assemble, chrome_trace
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.report import csv_files
from hvdkit.results.profile import Profile, save
from hvdkit.worker.profile import LEAST_STEPS

FILE, TRACE, PICTURE = "profile.json", "trace.json", "profile.png"
# With it Horovod's timeline can be started and stopped during a run.
_SETTINGS = {"HOROVOD_TIMELINE": "DYNAMIC"}
_LONGEST_ROUND = 1000  # updates between two synchronizations; a profile takes at least four rounds

MOST_STEPS = 100_000  # the trace events of each stay in memory until the end


@dataclass(frozen=True)
class ProfilePlan:
    """A profile that has passed every check that can be made before it starts.

    `asked` is the recipe as it was given; `left_out` has a line for each part of it that is not profiled.
    """

    asked: Recipe
    left_out: list[str]
    plan: Plan
    steps: int
    own_profile: bool


def plan(
    recipe: Recipe,
    framework: str,
    placement: Placement,
    steps: int = 20,
    own_profile: bool = False,
) -> ProfilePlan:
    """Check what was asked for. Raises RequestError with all its faults."""
    faults = Faults()
    if not LEAST_STEPS <= steps <= MOST_STEPS:
        faults.append(f"--steps {steps}: expected {LEAST_STEPS} or more, at most {MOST_STEPS:,}")
    if own_profile and "own-profile" not in CAPABILITIES.get(framework, frozenset()):
        faults.append(f"--torch-profiler: {framework} has none; leave it out or choose --framework pytorch")
    sync = recipe.sync
    if sync is not None and sync.every > _LONGEST_ROUND:
        faults.append(f"sync.every: expected at most {_LONGEST_ROUND} to profile whole rounds, got {sync.every}")
    still, left_out = _steady(recipe)
    if sync is not None and steps % sync.every:
        whole = sync.every * -(-steps // sync.every)
        left_out.append(f"--steps {steps}: measured are whole rounds of sync.every {sync.every}, {whole} steps")
    with faults.collected():
        found = make_plan(still, framework, placement)
    faults.report()
    settings = {**found.settings, **_SETTINGS}
    return ProfilePlan(recipe, left_out, replace(found, settings=settings), steps, own_profile)


def _steady(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe in its steady state, without checkpoints or evaluation; and a line for each part that is left out."""
    changes: dict[str, Any] = {"elastic": None, "checkpoint": None, "tensorboard": False}
    left_out, sync = [], recipe.sync
    if recipe.elastic is not None:
        left_out.append("elastic: what it costs is not profiled; the steps are those of a run whose ranks stay")
    if sync is not None and sync.start:
        changes["sync"] = sync.model_copy(update={"start": 0.0})
        left_out.append(f"sync.start: profiled are steps behind epoch {sync.start:g}; for those before, leave out sync")
    if getattr(recipe.compression, "warmup_epochs", 0):
        changes["compression"] = recipe.compression.model_copy(update={"warmup_epochs": 0})
        left_out.append("compression.warmup_epochs: profiled are steps behind the warm-up, at the recipe's own ratio")
    return recipe.model_copy(update=changes), left_out


def run(plan: ProfilePlan, folder: Path) -> Profile:
    """Run and measure; writes profile.json, trace.json and profile.png into `folder`, beside what they are made from.

    Raises what the launcher raises, RunError where a file cannot be written or nothing was measured.
    """
    recipe = plan.asked
    write_atomic(folder / "config.yaml", schema.dump(plan.plan.recipe))
    own = ["--own-profile"] if plan.own_profile else []
    arguments = ["--profile", str(folder), "--steps", str(plan.steps), *own]
    launch(plan.plan, folder / "config.yaml", arguments, folder / "logs")
    found = assemble.read(folder, recipe)
    profile = assemble.profile(found, recipe)
    write(profile, folder)
    write_atomic(folder / TRACE, chrome_trace.dump(found))
    from hvdkit.report.profile import picture

    picture(profile, found, folder / PICTURE)
    return profile


def write(profile: Profile, folder: Path) -> Profile:
    """Write profile.json and profile.csv into `folder`. Raises RunError if they cannot be written."""
    save(profile, folder / FILE)
    csv_files.save(folder / "profile.csv", csv_files.profile(profile))
    return profile
