"""Where the time of a recipe's steps goes: a short run under watch becomes profile.json, trace.json and a picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hvdkit import config, train
from hvdkit.adapters.declared import CAPABILITIES
from hvdkit.config import Recipe
from hvdkit.core.observing import LEAST_STEPS
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.profiling import assemble, trace
from hvdkit.profiling.profile import Profile, save
from hvdkit.train import Plan

FILE, TRACE, PICTURE = "profile.json", "trace.json", "profile.png"
# Horovod's timeline can then be begun and ended while it runs.
_SETTINGS = {"HOROVOD_TIMELINE": "DYNAMIC"}


@dataclass(frozen=True)
class ProfilePlan:
    """A profile that has passed every check that can be made before it starts."""

    plan: Plan
    steps: int
    own_profile: bool


def plan(
    recipe: Recipe,
    framework: str,
    np: int,
    hosts: str | None = None,
    launcher: str = "direct",
    stall_timeout_s: float = 60.0,
    steps: int = 20,
    own_profile: bool = False,
) -> ProfilePlan:
    """Check what was asked for. Raises RequestError with all its faults."""
    faults = [] if steps >= LEAST_STEPS else [f"--steps {steps}: expected {LEAST_STEPS} or more"]
    if own_profile and "own-profile" not in CAPABILITIES.get(framework, frozenset()):
        faults.append(f"--torch-profiler: {framework} has none; leave it out or choose --framework pytorch")
    still = recipe.model_copy(update={"elastic": None, "checkpoint": None, "tensorboard": False})
    found = None
    try:
        found = train.plan(still, framework, np, hosts, launcher, stall_timeout_s)
    except RequestError as error:
        faults += str(error).splitlines()
    if faults or found is None:
        raise RequestError("\n".join(faults))
    return ProfilePlan(replace(found, settings={**found.settings, **_SETTINGS}), steps, own_profile)


def run(plan: ProfilePlan, folder: Path) -> Profile:
    """Run and measure; profile.json, trace.json and profile.png come into `folder`, beside what they were made from.

    Raises what the launcher raises, RunError where a file cannot be written or nothing was measured.
    """
    recipe = plan.plan.recipe
    write_atomic(folder / "config.yaml", config.dump(recipe))
    own = ["--own-profile"] if plan.own_profile else []
    arguments = ["--profile", str(folder), "--steps", str(plan.steps), *own]
    train.launch(plan.plan, folder / "config.yaml", arguments, folder / "logs")
    found = assemble.read(folder, recipe)
    profile = assemble.profile(found, recipe)
    save(profile, folder / FILE)
    write_atomic(folder / TRACE, trace.dump(found))
    from hvdkit.report.profile import picture

    picture(profile, found, folder / PICTURE)
    return profile
