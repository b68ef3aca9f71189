"""The commands that reproduce the results of a report."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit import paths
from hvdkit.baselines.registry import label
from hvdkit.errors import RequestError
from hvdkit.recipe import schema, yaml_files
from hvdkit.recipe.schema import Recipe
from hvdkit.report.canvas import ranks
from hvdkit.report.collect import CollectedRuns, Run
from hvdkit.results.train import TrainResult


@dataclass(frozen=True)
class CommandLine:
    """A command line, and what it gives."""

    gives: str
    text: str


def locate(run: Run, folder: Path) -> CommandLine:
    """The command of one run of the results in `folder`, or a comment if its recipe is not known."""
    result = run.result
    who = label(result.framework, result.rival)
    gives = f"{who}, {ranks(result.np)}"
    if run.recipe is None:
        why = "its config.yaml is missing or cannot be read, so its settings are not known in full"
        return CommandLine(gives, f"# {why}")
    rival = ["--rival", result.rival] if result.rival else []
    words = ["hvdkit", "train", "--framework", result.framework, "-np", str(result.np), *rival, *_places(result)]
    recipe = _recipe(run, run.recipe)
    return CommandLine(gives, shlex.join([*words[:2], recipe[0], *words[2:], *_out(folder, run), *recipe[1:]]))


def of_all(given: CollectedRuns) -> CommandLine | None:
    """The command of a whole comparison; None for a single run, or if no recipe is known."""
    known = next((run for run in given.runs if run.recipe), None)
    if given.comparison is None or known is None or known.recipe is None:
        return None
    # compare never keeps checkpoints, so the command need not turn them off
    recipe, *overrides = _recipe(known, known.recipe.model_copy(update={"checkpoint": schema.Checkpointing()}))
    words = ["hvdkit", "compare", recipe]
    for index, option in enumerate(("--framework", "-np", "--rival")):
        for value in filter(None, dict.fromkeys(run.kind[index] for run in given.runs)):
            words += [option, str(value)]
    if given.comparison.rounds > 1:
        words += ["--rounds", str(given.comparison.rounds)]
    if given.comparison.parity is None:
        words += ["--no-parity"]
    words += _places(max((run.result for run in given.runs), key=lambda result: result.np))
    return CommandLine("all runs", shlex.join([*words, *_out(given.folder), *overrides]))


def _places(result: TrainResult) -> list[str]:
    """The options of the launcher, and of the hosts where it does not know them by itself."""
    hosts = [f"{name}:{slots}" for name, slots in Counter(result.hosts).items()]
    named = ["-H", ",".join(hosts)] if result.launcher in ("horovodrun", "mpirun") and hosts else []
    return [*named, *([] if result.launcher == "direct" else ["--launcher", result.launcher])]


def _out(folder: Path, run: Run | None = None) -> list[str]:
    """The option `--out` with a new folder beside the results, since theirs is not empty."""
    new = f"{folder.name or 'results'}-again"
    if run and run.config and run.config.parent != folder:
        new += f"-{run.config.parent.name}"
    return ["--out", str(folder.parent / new)]


def _recipe(run: Run, recipe: Recipe) -> list[str]:
    """The recipe and the overrides of a run: a recipe that comes with hvdkit, or the run's own file."""
    shipped = {path.stem: path for path in paths.recipes().glob("*.yaml")}.get(recipe.name)
    if shipped:
        try:
            overrides = _overrides(schema.load(shipped).model_dump(), recipe.model_dump())
            if schema.load(shipped, overrides) == recipe:
                return [recipe.name, *overrides]
        except RequestError:
            pass  # the recipe of another version: name the run's own file
    return [str(run.config)]


def _overrides(base: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """The overrides that turn `base` into `wanted`; a section with another name is set as a whole."""
    words: list[str] = []
    for key, value in wanted.items():
        old = base.get(key)
        if old == value:
            continue
        same_kind = isinstance(old, dict) and isinstance(value, dict) and old.get("name") == value.get("name")
        if same_kind and isinstance(old, dict):
            words += _overrides(old, value, f"{prefix}{key}.")
        else:
            text = yaml_files.dump(value, default_flow_style=True, width=10**6)
            words.append(f"{prefix}{key}={text.removesuffix('...' + chr(10)).strip()}")
    return words
