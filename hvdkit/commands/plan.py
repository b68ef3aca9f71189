"""`hvdkit plan`: which strategy trains a recipe on a cluster, and why not another; nothing is started."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field
from rich.table import Table

from hvdkit import paths, tasks
from hvdkit.commands import advise, predict
from hvdkit.commands.fields import Framework, MayWrite, Overrides, RecipeFile, profile_file
from hvdkit.commands.loading import loaded
from hvdkit.commands.memory import bytes_of, devices
from hvdkit.commands.predict import ClusterFile
from hvdkit.commands.request import Accepts, Option, say
from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import Faults, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.recipe import parallel, registry, schema, yaml_files
from hvdkit.recipe.schema import Recipe
from hvdkit.report import ladder as report
from hvdkit.report.tabular import terminal
from hvdkit.results.json_files import flat
from hvdkit.results.ladder import Ladder
from hvdkit.results.profile import Profile
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.runtimes.store import unknown
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import doubt, ladder, memory, updates
from hvdkit.simulator import predict as predicting
from hvdkit.simulator.calibration import calibrate
from hvdkit.simulator.ladder import Situation
from hvdkit.tasks.task import NOT_COUNTED, parameter_count


class PlanRequest(MayWrite):
    """Say which strategy trains a recipe on a cluster, and why not another; nothing is started.

    With a `profile`, measured or `--from` a published figure, each way has its predicted time of an update; `speed` is
    how many times as fast as the profile's a device of the cluster is. `device` stands for the cluster's, or is its
    memory. `samples` are those of an epoch. With `apply`, a file, the recipe is written so that `train` runs it.
    """

    recipe: RecipeFile
    overrides: Overrides = None
    cluster: ClusterFile
    ranks: Annotated[int, Option("number of ranks", ("-n", "-np", "--np")), Field(ge=1, le=ladder.MOST_RANKS)]
    framework: Framework = FRAMEWORK
    profile: Annotated[
        Path | None,
        Accepts("PathLike | Profile", "a profile, or its file", profile_file),
        Option("a profile of the recipe's model, for the time of an update", metavar="PROFILE.json", shown="no times"),
    ] = None
    speed: Annotated[
        float, Option("how many times as fast as the profile's a device of the cluster is"), Field(gt=0, le=1e6)
    ] = 1.0
    device: Annotated[str | None, Option("a GPU such as h100, or its memory such as 24GiB", shown="the cluster's")] = (
        None
    )
    samples: Annotated[int | None, Option("samples of an epoch", shown="the recipe's data"), Field(ge=1)] = None
    apply: Annotated[
        Path | None,
        Option("write the recipe of what was chosen", ("--new-recipe",), old=("--apply",), metavar="NEW.yaml"),
    ] = None


def run(request: PlanRequest) -> Ladder:
    """Plan, and write plan.json and the recipe where that is asked for.

    Raises RequestError with all faults of the request, and RunError where nothing fits that could be applied.
    """
    advise.check(request.apply)
    recipe = loaded(request)
    made = _planned(recipe, request)
    if request.apply is not None:
        say([_applied(made, recipe, request.apply)])
    with request.claimed() as folder:
        return made.written(folder) if folder else made


def lines(request: PlanRequest, result: Ladder) -> Iterator[str | Table]:
    """A table of the rungs, and what was chosen."""
    yield report.title(result)
    table = report.table(result)
    yield terminal(table, "", wrap_from=len(table.columns) - 1)
    yield from report.sentences(result)
    if request.out:
        yield f"written to {result.folder / result.FILE}"


def _planned(recipe: Recipe, request: PlanRequest) -> Ladder:
    faults, cluster, profile, size = Faults(), None, None, None
    with faults.collected():
        cluster = clusters.load(request.cluster)
        predicting.checked([request.ranks], cluster)
    with faults.collected():
        size = bytes_of(request.device)
    if request.framework not in FRAMEWORKS:
        faults.append(unknown("framework", request.framework, FRAMEWORKS))
    with faults.collected():
        parallel.check_ranks(recipe.parallel, request.ranks)
    shape = memory.sample_shape(recipe)
    parameters = parameter_count(tasks.choose(recipe).architecture(shape))
    if not parameters:
        faults.append(f"{recipe.name}: {NOT_COUNTED}")
    with faults.collected():
        profile = None if request.profile is None else _profile(request.profile, recipe, parameters)
    faults.report()
    assert cluster
    device, named = cluster.device, devices().get((request.device or "").strip().lower())
    own = bool(named or device.relative_speed or device.memory_mib)  # processors have no memory of their own
    gpu = recipe.device == "gpu" or (recipe.device == "auto" and own)
    if size is not None:
        device = named or device.model_copy(update={"memory_mib": size / 2**20})
        cluster = cluster.model_copy(update={"device": device})
    size = device.bytes
    samples = request.samples or advise.samples_of(recipe.model_dump(mode="json"))
    ranks = ladder.trainable_ranks(recipe, request.ranks, samples)
    half, notes = device.half_precision if gpu else "bf16", []
    if ranks < request.ranks:
        what = f"an epoch has {samples:,} samples, and a batch takes {recipe.batch_size} of each rank"
        notes.append(f"{ranks} ranks in place of {request.ranks}: {what}")
    if size is None:
        notes.append(f"what fits is unknown: {cluster.name} does not have its devices' memory; give --device 24GiB")
    if gpu and recipe.device == "auto" and not (named or device.relative_speed):
        notes.append(f"{device.name} is taken for a GPU, as it has memory of its own; give device=cpu for processors")
    if gpu and recipe.precision == "bf16" and half != "bf16" and device.relative_speed:
        notes.append(
            f"precision: {device.name} does not compute in bf16; give precision={half if half != 'none' else 'fp32'}"
        )
    if not gpu:
        notes.append(memory.ON_CPUS)
    if shape is None:
        notes.append("activations: unknown, as only the ranks know the shape of a sample")
    room = None if size is None else memory.usable(size, gpu)
    situation = Situation(recipe, ranks, cluster.ranks_per_host, request.framework, gpu, room, half)
    if profile is None:
        rungs = ladder.climb(situation)
    else:
        fitted = calibrate(profile)
        known = flat(profile.settings) | {"precision": profile.precision}  # a published one has no sizes of samples
        profiled = schema.flat(recipe) | known
        notes += [f"a guess: {line}" for line in doubt.guesses(fitted, cluster, request.speed)]
        rungs = ladder.climb(situation, partial(updates.update, fitted, profiled, cluster, ranks, request.speed))
    return Ladder(
        recipe=recipe.name,
        model=recipe.model.name,
        parameters=parameters,
        framework=request.framework,
        cluster=cluster.name,
        device=device.name,
        device_bytes=size,
        room_bytes=room,
        asked_ranks=request.ranks,
        ranks=ranks,
        samples_per_update=recipe.batch_size * recipe.accumulate * recipe.data_ranks(ranks),
        profile=None if profile is None else predicting.source(profile),
        rungs=rungs,
        notes=notes,
    )


def _profile(path: Path, recipe: Recipe, parameters: int) -> Profile:
    """A profile of the recipe's model. Raises RequestError for one of another."""
    profile = predict.read(path)
    got = sum(math.prod(tensor.shape) for tensor in profile.tensors)
    if got != parameters:
        raise RequestError(
            f"--profile {path}: expected one of {recipe.model.name} with {parameters:,} parameters, got one of "
            f"{profile.model} with {got:,}"
        )
    return profile


def _applied(made: Ladder, recipe: Recipe, path: Path) -> str:
    """Write the recipe of the chosen rung; returns a line about it. Raises RunError where there is none."""
    rung = made.chosen
    if rung is None:
        raise RunError("--new-recipe: nothing written, as nothing fits on these ranks")
    keys = [f"{key}={json.dumps(value)}" for key, value in rung.changes.items()]
    changed = schema.revise(recipe.model_dump(), recipe.name, keys)
    write_atomic(path, yaml_files.schema_line(paths.recipes() / registry.SCHEMA) + schema.dump(changed))
    return f"{path}: the recipe by {rung.name}: hvdkit train {path} --framework {made.framework} -np {made.ranks}"
