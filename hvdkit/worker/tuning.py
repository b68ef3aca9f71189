"""Horovod's settings that a run chooses for speed, with a reason for each. They do not change what is computed.

Horovod reads its settings from the environment when it starts; variables that the user has set stay as they are.
hvdkit's launcher chooses the settings and passes them with their reasons (`HVDKIT_TUNED`, JSON), because changing the
environment of a process is not safe once the framework has threads that read it. Under another launcher the rank has
to change its own environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvdkit import tasks
from hvdkit.core.pieces import BUCKET_BYTES, PIECE_BYTES
from hvdkit.core.update_rules import rule_of
from hvdkit.errors import LARGEST
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.task import parameter_count

CYCLE, FUSION, CACHE = "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CACHE_CAPACITY"
SHARED = "HOROVOD_SHARED_MEMORY"  # ranks of one host talk through memory unless it is 0 (runtimes/patches)
IDLE = "HOROVOD_IDLE_CYCLE_TIME"  # read by the Horovod that `hvdkit runtime build` builds (runtimes/patches)
_NOT_OF = {"language_modeling": ("images",)}  # the adapters' settings that do not concern a task
CHOSEN = "HVDKIT_TUNED"
FUSION_BYTES, _CACHED = 128 * 2**20, 1024
_DEFAULTS = {CYCLE: 1, FUSION: FUSION_BYTES, CACHE: _CACHED}  # of Horovod 0.28.1: milliseconds, bytes, tensors
LONGER_CYCLE_MS, IDLE_MS = 5, 100


@dataclass(frozen=True)
class Choice:
    """A setting's value (None: the library's default) and the reason for it."""

    value: Any
    why: str


_applied: dict[str, Choice] = {}


def apply(recipe: Recipe) -> dict[str, Choice]:
    """Put Horovod's settings for the recipe into the environment, once per process before `init`; returns them."""
    if not _applied:
        _applied.update(choose(recipe, os.environ))
        wanted = _values(_applied) | needed(recipe)
        os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
    return _applied


def in_force(recipe: Recipe) -> dict[str, float]:
    """The cycle time (ms), fusion threshold (bytes) and cache capacity (tensors) in force, chosen or default."""
    chosen = {name: choice.value for name, choice in apply(recipe).items()}
    return {name: float(own if chosen[name] is None else chosen[name]) for name, own in _DEFAULTS.items()}


def environment(recipe: Recipe, given: Mapping[str, str]) -> dict[str, str]:
    """The variables that a launcher adds to the environment `given`, so that a rank need not change its own."""
    choices = choose(recipe, given)
    return _values(choices) | needed(recipe) | {CHOSEN: json.dumps(listed(choices, {}))}


def needed(recipe: Recipe) -> dict[str, str]:
    """The variables without which Horovod cannot run the recipe."""
    sets = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if recipe.allreduce == "hierarchical" else {}
    return sets | ({"HOROVOD_CREDIT_BYTES": str(PIECE_BYTES)} if recipe.order == "priority" else {})


def _values(choices: Mapping[str, Choice]) -> dict[str, str]:
    return {name: str(choice.value) for name, choice in choices.items() if choice.value is not None}


def choose(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, Choice]:
    """Horovod's settings for a recipe in this environment, by the name of the variable."""
    launchers = _brought_along(environment)
    choices = dict.fromkeys((IDLE, *_DEFAULTS), Choice(None, "Horovod's default: tune is none"))
    if recipe.tune != "none":
        choices = {IDLE: _idle(recipe, environment), CYCLE: _cycle(recipe)}
        choices |= {FUSION: _fusion(recipe), CACHE: _cache(recipe)}
    for name in choices.keys() & environment.keys():
        measured = name in launchers and str(launchers[name].value) == environment[name]
        choices[name] = launchers[name] if measured else Choice(environment[name], "set in the environment")
    return choices


def _brought_along(environment: Mapping[str, str]) -> dict[str, Choice]:
    """The launcher's choices; empty if the variable holds anything else."""
    try:
        return {name: Choice(**choice) for name, choice in json.loads(environment.get(CHOSEN, "{}")).items()}
    except (AttributeError, TypeError, ValueError, RecursionError):
        return {}


def faults(environment: Mapping[str, str]) -> list[str]:
    """Error lines for Horovod's settings in the environment that are not numbers of at least 0, each with its name.

    For Horovod, any word is a 0.
    """
    lines, shared = [], environment.get(SHARED, "1")
    if shared not in ("0", "1"):
        lines.append(f"{SHARED}: expected 0 (sockets) or 1 (memory), got {shared!r}; set it anew, or unset it")
    for name in (CYCLE, FUSION, CACHE, IDLE):
        try:
            right = 0 <= float(environment.get(name) or 0) < LARGEST
        except ValueError:
            right = False
        if not right:
            lines.append(f"{name}: expected a number, 0 or more, got {environment[name]!r}; set it anew, or unset it")
    return lines


def listed(
    choices: Mapping[str, Choice], adapters: Mapping[str, tuple[str, str]], task: str = ""
) -> dict[str, dict[str, Any]]:
    """The choices and the adapter's own settings as a result file stores them: value and reason by name.

    Those that do not concern the task, such as the layout of images for a text, are left out.
    """
    left_out = _NOT_OF.get(task, ())
    own = {name: {"value": value, "why": why} for name, (value, why) in adapters.items() if name not in left_out}
    return {name: asdict(choice) for name, choice in choices.items()} | own


def _idle(recipe: Recipe, environment: Mapping[str, str]) -> Choice:
    """How long Horovod's background thread may sleep while there is nothing to reduce, in milliseconds."""
    if recipe.device == "gpu":
        return Choice(None, "Horovod's default, a wake-up per cycle: GPUs compute, so cores are free")
    if CYCLE in environment:
        return Choice(None, f"Horovod's default, a wake-up per cycle, as {CYCLE} is set in the environment")
    return Choice(IDLE_MS, "Horovod's thread sleeps until a tensor comes; other wake-ups cost CPU time")


def _cycle(recipe: Recipe) -> Choice:
    """The cycle time in milliseconds, after which Horovod's background thread wakes if no tensor wakes it."""
    own = f"Horovod's default, {_DEFAULTS[CYCLE]} ms"
    if recipe.device == "gpu":
        return Choice(None, f"{own}: GPUs compute, so cores are free")
    if recipe.elastic:
        # If a cycle time is set, a rank that initializes Horovod 0.28.1 for the second time uses its milliseconds as
        # the fusion threshold in MiB (parameter_manager.cc, SetValue), and crashes when it reduces with a new rank.
        return Choice(None, f"{own}: in an elastic run, Horovod takes a given one for another setting")
    return Choice(
        LONGER_CYCLE_MS,
        f"for a Horovod without {IDLE}: each wake-up costs CPU time, and gradients wait one cycle longer at most",
    )


def _fusion(recipe: Recipe) -> Choice:
    """The fusion threshold: how many bytes are reduced together."""
    whole = 8 * parameter_count(tasks.choose(recipe).architecture())
    own = f"Horovod's default, {FUSION_BYTES >> 20} MiB"
    if recipe.sharding != "none" and not recipe.elastic:
        return Choice(BUCKET_BYTES, "gradients come in buckets of this size; fusing them would copy them once more")
    if not whole:
        return Choice(None, f"{own}: only the script knows the model's size")
    if whole <= FUSION_BYTES:
        return Choice(None, f"{own}: it holds all gradients of the model")
    if recipe.elastic:
        return Choice(None, f"{own}: in an elastic run, Horovod takes a given one for another setting")
    return Choice(whole, "all gradients of the model, in float64 too, as one")


def _cache(recipe: Recipe) -> Choice:
    """The cache capacity: for how many tensors Horovod caches the negotiation."""
    parameters = len(tasks.choose(recipe).architecture().parameter_shapes())
    # At the start parameters, about as many running statistics, and slots are broadcast; each step reduces gradients.
    needed = (3 + len(rule_of(recipe.optimizer).slots)) * parameters
    if recipe.order == "priority":
        needed += parameter_count(tasks.choose(recipe).architecture()) // 2**17  # pieces of 1 MiB, in float64 too
    if not parameters or needed <= _CACHED:
        why = f"all of this model's {needed} fit" if parameters else "only the script knows the model's size"
        return Choice(None, f"Horovod's default, {_CACHED} tensors: {why}")
    return Choice(needed, f"Horovod's default, {_CACHED}, is less than this model's {needed} tensors")
