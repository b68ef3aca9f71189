"""Training as a job for a scheduler: `submit`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit import paths
from hvdkit.api.calls import load_recipe
from hvdkit.arguments import AnyRecipe, PathLike, Settings, as_path, checked, texts
from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.commands.submit import Submitted


@checked
def submit(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    to: str = "slurm",
    framework: str = FRAMEWORK,
    np: int = 1,
    rival: str | None = None,
    resources: Mapping[str, Any] | None = None,
    array: Settings = None,
    out: PathLike | None = None,
    run: PathLike | None = None,
    template: PathLike | None = None,
    overwrite: bool = False,
    apply: bool = False,
) -> Submitted:
    """Write training as a job for a scheduler, `slurm` or `kubernetes`; with `apply` hand it over.

    `resources` are the scheduler's own options, such as `{"nodes": 2, "time": "1:00:00"}`: the fields of `Resources` in
    `hvdkit/launch/submission/sbatch.py`, or of `Pods` in `kubernetes.py` there.
    `template` is a Jinja template in place of hvdkit's own (docs/slurm.md#a-template-of-your-own).
    `array` makes a task of a Slurm array of each combination of values, such as `{"seed": [1, 2, 3]}`.
    """
    from hvdkit.commands import submit as submit_
    from hvdkit.launch.submission import kubernetes, sbatch
    from hvdkit.recipe import grid as grids
    from hvdkit.recipe.schema import Recipe

    kinds = submit_.RESOURCES
    if to not in kinds:
        raise RequestError(f"--to {to}: expected {' or '.join(kinds)}")
    wanted: dict[str, Any] = {**dict(resources or {}), "tasks": operator.index(np)}
    if to == "kubernetes":
        if array or run:
            raise RequestError(f"--{'array' if array else 'run'}: an option for --to slurm, and this job is for {to}")
        if missing := [f"--{name}" for name in ("image", "results") if name not in wanted]:
            raise RequestError(f"{', '.join(missing)}: expected with --to kubernetes (docs/kubernetes.md)")
        loaded = load_recipe(recipe, overrides)
        name = wanted.get("name") or kubernetes.default_name(loaded.name, time.strftime("%m%d-%H%M%S"))
        pods = _built(kinds[to], {**wanted, "name": name})
        # A faulty name is refused by its own line, and is no file's name before.
        file = as_path(out) or Path("runs") / f"{Path(pods.name).name}.yaml"
        return submit_.write(
            submit_.to_kubernetes(loaded, framework, pods, rival, file, overwrite, as_path(template)), apply
        )
    grid = dict(array) if isinstance(array, Mapping) else grids.read(texts("array", array), "--array", Recipe)
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise RequestError(f"--array {key}: expected a list of values, got {values!r}")
    if twice := [word for word in texts("overrides", overrides) if word.partition("=")[0] in grid]:
        raise RequestError(f"{', '.join(twice)}: --array gives this key's values; leave one of the two out")
    if (count := math.prod(map(len, grid.values()))) > sbatch.MOST_TASKS:
        raise RequestError(f"--array: expected at most {sbatch.MOST_TASKS:,} tasks, got {count:,}")
    chosen = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    words = [texts("array", combination) for combination in chosen]
    recipes = {" ".join(changes): load_recipe(recipe, overrides, extra=changes) for changes in words}
    if len(recipes) < count:
        raise RequestError("--array: expected each value of a key once, as equal tasks train the same")
    name = next(iter(recipes.values())).name
    target = as_path(run) or paths.default_out(name, "train")
    script = as_path(out) or target.with_name(f"{target.name}.sbatch")
    job = submit_.to_slurm(
        recipes, framework, _built(kinds[to], wanted), rival, script, target, overwrite, as_path(template)
    )
    return submit_.write(job, apply)


def _built(kind: Any, wanted: Mapping[str, Any]) -> Any:
    """The resources of a job. Raises RequestError for keys and types that it does not have."""
    from pydantic import TypeAdapter, ValidationError

    names = {field.name for field in dataclasses.fields(kind)} - {"tasks"}
    if unknown := sorted(wanted.keys() - names - {"tasks"}):
        raise RequestError(f"resources: {', '.join(unknown)}: expected some of {', '.join(sorted(names))}")
    try:
        return TypeAdapter(kind).validate_python(wanted)
    except ValidationError as error:
        lines = [f"resources: {fault['loc'][0]}: {fault['msg']}, got {fault['input']!r}" for fault in error.errors()]
        raise RequestError("\n".join(lines)) from None
