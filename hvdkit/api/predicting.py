"""What a run would need, or do elsewhere: `memory`, `predict`, `sweep` and `advise`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit import paths
from hvdkit.api.calls import claimed, load_recipe, profile_file, say
from hvdkit.arguments import AnyRecipe, Names, PathLike, Settings, Wholes, as_path, checked, joined, texts, wholes
from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.results.memory import MemoryNeed
    from hvdkit.results.profile import Profile
    from hvdkit.simulator.advise import Advice
    from hvdkit.simulator.predict import Prediction
    from hvdkit.simulator.sweep import Sweep


@checked
def memory(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    ranks: Wholes = None,
    device: str | None = None,
    framework: str = FRAMEWORK,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> MemoryNeed:
    """Count the memory that a recipe needs at each number of ranks and stage of sharding; nothing is started.

    `device` is a GPU's name, such as `h100`, or its memory, such as `24GiB`. Without `out` nothing is written.
    """
    from hvdkit.commands import memory as memory_
    from hvdkit.files import write_atomic
    from hvdkit.results.memory import FILE

    needs = memory_.run(load_recipe(recipe, overrides), wholes(ranks) or [1], device, framework)
    if not out:
        return needs
    with claimed(Path(out), overwrite) as folder:
        write_atomic(folder / FILE, needs.model_dump_json(indent=2) + "\n")
        return needs.at(folder)


@checked
def predict(
    profile: PathLike | Profile,
    *,
    cluster: PathLike,
    ranks: Wholes,
    policy: str | None = None,
    settings: Settings = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Prediction:
    """Predict step time, images/s and what bounds them, at any number of ranks, from a profile and a cluster file.

    `cluster` is a file, or the name of one of hvdkit's; `settings` is a what-if, such as `{"batch_size": 64}`.
    """
    from hvdkit.commands import predict as predict_

    path = profile_file(profile)
    plan = predict_.plan(path, Path(cluster), wholes(ranks), texts("settings", settings), policy)
    target = as_path(out) or paths.default_out(plan.profile.recipe, "predict")
    with claimed(target, overwrite, inputs=[path, Path(cluster)]) as folder:
        return predict_.predict(plan, folder).at(folder)


@checked
def sweep(
    profile: PathLike | Profile,
    grid: Settings,
    *,
    cluster: PathLike,
    ranks: Wholes = None,
    policy: str | None = None,
    settings: Settings = None,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Sweep:
    """Predict a grid of what-ifs, such as `{"n": [8, 16, 32], "batch_size": [32, 64]}`, or `["n=8,16,...,1024"]`.

    `n` is the number of ranks, which `ranks` may say instead; the other keys are those of `predict`'s `settings`.
    """
    from hvdkit.commands import predict as predict_
    from hvdkit.recipe import grid as grids

    path = profile_file(profile)
    wanted = dict(grid) if isinstance(grid, Mapping) else grids.read(texts("grid", grid), "--sweep")
    answer = predict_.sweep(path, Path(cluster), wholes(ranks), wanted, texts("settings", settings), policy)
    target = as_path(out) or paths.default_out("sweep", "predict")
    with claimed(target, overwrite, inputs=[path, Path(cluster)]) as folder:
        return answer(folder).at(folder)


@checked
def advise(
    subject: AnyRecipe | Profile,
    overrides: Settings = None,
    *,
    cluster: PathLike | None = None,
    ranks: int | None = None,
    price: float | None = None,
    images: int | None = None,
    tokens: int | None = None,
    epochs: int | None = None,
    budget: float | None = None,
    deadline: str | None = None,
    spot_interruption: float | None = None,
    apply: PathLike | None = None,
    policy: str | None = None,
    settings: Settings = None,
    framework: str | None = None,
    np: int | None = None,
    hosts: Names = None,
    steps: int | None = None,
    launcher: str | None = None,
    stall_timeout: float | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Advice:
    """Rank what would make training faster or cheaper, from a profile, or from a recipe, which is profiled first.

    `overrides`, `framework` to `stall_timeout` and `resume` are for a recipe; None stands for what `profile` takes.
    `images`, or `tokens` of a text, are those of an epoch. `price` and `budget` are in the cluster's currency;
    `deadline` is a time such as `36h`, `friday` or `2026-11-27`.
    `spot_interruption` is how often a host is taken away in an hour. With `apply`, a file, the recipe with the largest
    certain gain is written there.
    """
    from hvdkit.commands import advise as advise_
    from hvdkit.commands import predict as predict_

    of_recipes = {
        "key=value": overrides, "--framework": framework, "-np": np, "-H": hosts, "--steps": steps,
        "--launcher": launcher, "--stall-timeout": stall_timeout, "--resume": resume,
    }  # fmt: skip
    target, links = as_path(apply), as_path(cluster)
    predict_.check(price, target, budget, spot_interruption)
    deadline_s = predict_.seconds_until(deadline, datetime.now())
    path = None if isinstance(subject, Mapping) else profile_file(subject)
    measured = path is not None and path.suffix == ".json"
    if measured and ranks is None and [name for name, value in of_recipes.items() if value] == ["-np"]:
        ranks, of_recipes = np, {}  # there is nothing to profile, so it can only mean the number of ranks
    question = predict_.question(links, wholes(ranks), texts("settings", settings), policy)
    if measured and path is not None:
        request = advise_.of_profile(path, question, of_recipes)
    else:
        if resume and out is None:
            raise RequestError("--resume: expected --out with the folder of an earlier hvdkit advise")
        recipe = load_recipe(path or subject, overrides)  # type: ignore[arg-type]  # no profile
        request = advise_.of_recipe(recipe, question, framework, np, joined(hosts), steps, launcher, stall_timeout)
    destination = as_path(out) or paths.default_out(request.name, "advise")
    with claimed(destination, overwrite, resume, [path, links]) as folder:
        plan = request.plan(folder)
        advice = predict_.advise(
            plan, predict_.money(plan, price, images, epochs, budget, deadline_s, spot_interruption, tokens), folder
        )
        if target is not None:
            say([f"{target}: the recipe with {predict_.apply(advice, request.settings, target)}"])
        return advice.at(folder)
