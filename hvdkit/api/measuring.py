"""Where time goes on this machine: `profile`, `published_profile` and `bench`."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from hvdkit import paths
from hvdkit.api.calls import claimed, load_recipe, say
from hvdkit.arguments import AnyRecipe, Names, PathLike, Settings, Wholes, as_path, checked, joined, wholes
from hvdkit.defaults import FRAMEWORK, LAUNCHER, PROFILED_RANKS, STALL_TIMEOUT_S, STEPS

if TYPE_CHECKING:
    from hvdkit.results.profile import Profile


@checked
def profile(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: str = FRAMEWORK,
    np: int = PROFILED_RANKS,
    hosts: Names = None,
    steps: int = STEPS,
    torch_profiler: bool = False,
    batch_sizes: Wholes = None,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    debug: bool = False,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile:
    """Measure where the time of a step goes, by layer and by rank.

    `batch_sizes` also measures compute at these, so that `predict` knows which part of it does not depend on them.
    """
    from hvdkit.commands import profile as profile_
    from hvdkit.launch.placement import Placement

    loaded = load_recipe(recipe, overrides)
    placement = Placement(operator.index(np), joined(hosts), launcher, stall_timeout, debug=debug)
    plan = profile_.plan(loaded, framework, placement, steps, torch_profiler, wholes(batch_sizes))
    target = as_path(out) or paths.default_out(loaded.name, "profile")
    with claimed(target, overwrite, inputs=[loaded.model.weights], dry=("of_profile", plan, target)) as folder:
        say([*plan.left_out, *plan.plan.warnings])
        return profile_.run(plan, folder).at(folder)


@checked
def published_profile(
    model: str,
    *,
    images_per_second: float | None = None,
    tokens_per_second: float | None = None,
    batch_size: int,
    device: str,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile:
    """Make a profile for `predict` and `advise` from a published figure of one device; nothing is measured.

    `model` is one of hvdkit's, such as `resnet50` or `gpt2`; `device` is a GPU's name, or `cpu`. `batch_size` counts
    images, or a GPT's windows of 1,024 tokens.
    """
    from hvdkit.commands import profile as profile_
    from hvdkit.profiling import published

    profiled = published.profile(model, images_per_second, operator.index(batch_size), device, tokens_per_second)
    with claimed(as_path(out) or paths.default_out(profiled.recipe, "profile"), overwrite) as folder:
        return profile_.write(profiled, folder).at(folder)
