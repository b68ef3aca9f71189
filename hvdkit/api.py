"""hvdkit's commands as functions, such as `hvdkit.train("resnet20-digits", np=2)` (docs/python.md).

Each takes the options of the command of its name, and returns what that command writes; the command line calls them
too. They show progress on standard error, or in the notebook. Besides the errors named below they raise RequestError
for a wrong request, with all its faults and before anything starts; RunError if a run fails; and KeyboardInterrupt on
Ctrl-C, once all ranks have ended.
"""

from __future__ import annotations

import copy
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit import paths
from hvdkit.arguments import (
    AnyRecipe,
    Names,
    PathLike,
    Paths,
    Settings,
    Wholes,
    as_path,
    as_paths,
    checked,
    joined,
    listed,
    texts,
    wholes,
)
from hvdkit.defaults import (
    BEGAN,
    COMPARED_RANKS,
    FRAMEWORK,
    LAUNCHER,
    MARGIN,
    OVERRIDES_FROM,
    PROFILED_RANKS,
    STALL_TIMEOUT_S,
    STEPS,
)
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.recipe.schema import Recipe
    from hvdkit.results.bench import Bench
    from hvdkit.results.compare import Comparison
    from hvdkit.results.diff import Diff
    from hvdkit.results.dry_run import DryRun
    from hvdkit.results.evaluate import EvaluationResult
    from hvdkit.results.generate import Generation
    from hvdkit.results.parity import Parity
    from hvdkit.results.predict_images import ImagePredictions
    from hvdkit.results.profile import Profile
    from hvdkit.results.train import TrainResult
    from hvdkit.simulator.advise import Advice
    from hvdkit.simulator.predict import Prediction
    from hvdkit.simulator.sweep import Sweep

_dry: ContextVar[bool] = ContextVar("dry", default=False)


@checked
def train(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: str | None = None,
    np: int = 1,
    hosts: Names = None,
    rival: str | None = None,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    debug: bool = False,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
    host_discovery_script: PathLike | None = None,
    log: Names = None,
) -> TrainResult:
    """Train a recipe under one framework, on `np` ranks; `hosts` is `"host:slots,…"` or a list of such parts.

    Without a `framework` it is that of the run that is resumed, or of the recipe's script, else PyTorch.
    `log` names trackers: wandb, mlflow, tensorboard.

    Raises Stopped if SIGTERM ended training after a checkpoint.
    """
    from hvdkit.commands import train as train_
    from hvdkit.commands.plan import make_plan
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import RunProgress
    from hvdkit.results.train import doubts
    from hvdkit.tracking import trackers as tracking

    began = BEGAN.get() or time.time()
    names = tracking.check(listed(log))
    loaded = _loaded(recipe, overrides, as_path(out) if resume else None, tracking.overrides(names))
    if resume and (out is None or loaded.checkpoint is None):
        raise RequestError("--resume: expected --out with the run's folder, and a recipe without `checkpoint: null`")
    discovery = as_path(host_discovery_script)
    placement = Placement(operator.index(np), joined(hosts), launcher, stall_timeout, discovery, debug)
    framework = framework or (train_.writer(Path(out)) if resume and out else None)
    plan = replace(make_plan(loaded, framework, placement, rival), began=began)
    place = as_path(out) or paths.default_out(loaded.name, "train")
    with _claimed(place, overwrite, resume, [loaded.model.weights], dry=("of_train", plan, place, resume)) as folder:
        if loaded.checkpoint and out is None:
            _say([f"no --out: checkpoints go to {place}; --out {place} --resume goes on from them"])
        _say(plan.warnings)
        with RunProgress([plan.title]) as progress, tracking.Trackers(names, _line) as trackers:
            result = train_.run(plan, folder, progress.watch(plan.title), resume, trackers)
    _say(doubts(result))
    return result


@checked
def evaluate(
    checkpoint: PathLike,
    overrides: Settings = None,
    *,
    framework: str | None = None,
    np: int = 1,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> EvaluationResult:
    """Evaluate a checkpoint, under its own framework or another; of a run's folder the best one, else the last."""
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import evaluate as evaluate_
    from hvdkit.launch.placement import Placement

    found = locate(Path(checkpoint))
    placement = Placement(operator.index(np), launcher=launcher, stall_timeout_s=stall_timeout)
    plan = evaluate_.plan(found, texts("overrides", overrides), framework, placement, OVERRIDES_FROM.get())
    if out and paths.lies_in(found, Path(out)):
        raise RequestError(f"--out {out}: the checkpoint lies in it; choose another folder")
    with _claimed(as_path(out) or paths.default_out(plan.recipe.name, "evaluate"), overwrite) as folder:
        return evaluate_.run(plan, found, folder)


@checked
def predict_images(
    checkpoint: PathLike,
    images: Paths,
    *,
    framework: str | None = None,
    top: int = 3,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> ImagePredictions:
    """Say what is in pictures: the `top` most probable classes of each, by a run's or a checkpoint's model.

    `images` are JPEG or PNG files, or folders of them. Without `out` nothing is written.
    """
    from hvdkit.commands import predict_images as predict_images_

    request = predict_images_.check(Path(checkpoint), as_paths(images), framework, operator.index(top))
    inputs = [Path(checkpoint), *as_paths(images)]
    with _claimed(Path(out), overwrite, inputs=inputs) if out else nullcontext() as folder:
        found = predict_images_.run(request, folder)
        return found.at(folder) if folder else found


@checked
def diff(first: PathLike, second: PathLike, *, out: PathLike | None = None, overwrite: bool = False) -> Diff:
    """What differs between two runs: settings, versions, the first step with another loss, weights.

    `same` of the result says whether the training is. Without `out` nothing is written.
    """
    from hvdkit.commands import diff as diff_
    from hvdkit.files import write_atomic
    from hvdkit.results.diff import FILE

    runs = [Path(first), Path(second)]
    found = diff_.run(*runs)
    if not out:
        return found
    with _claimed(Path(out), overwrite, inputs=runs) as folder:
        write_atomic(folder / FILE, found.model_dump_json(indent=2) + "\n")
        return found.at(folder)


@checked
def generate(
    checkpoint: PathLike,
    prompt: str,
    *,
    framework: str | None = None,
    tokens: int = 200,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Generation:
    """Go on with a text: a run's or a checkpoint's language model adds the most probable token again and again.

    Without `out` nothing is written.
    """
    from hvdkit.commands import generate as generate_

    request = generate_.check(Path(checkpoint), prompt, framework, operator.index(tokens))
    with _claimed(Path(out), overwrite, inputs=[Path(checkpoint)]) if out else nullcontext() as folder:
        found = generate_.run(request, folder)
        return found.at(folder) if folder else found


@checked
def export(checkpoint: PathLike, out: PathLike, *, overwrite: bool = False) -> Path:
    """Write a model as one file, FILE.safetensors, FILE.onnx or FILE.keras; returns its absolute path.

    Of a run's folder it is the best checkpoint's, else the last one's.
    """
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import export as export_

    plan = export_.plan(locate(Path(checkpoint)), Path(out), overwrite)
    export_.run(plan)
    return plan.out


@checked
def compare(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: Names = None,
    np: Wholes = None,
    parity: PathLike | None = None,
    no_parity: bool = False,
    rival: Names = None,
    rounds: int | None = None,
    baseline: PathLike | None = None,
    margin: float = MARGIN,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    debug: bool = False,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
    log: Names = None,
) -> Comparison:
    """Check that frameworks (all four, or those named) do the same work, train a recipe under each, on 1 and 2 ranks
    or as many as `np` says, and compare the results.

    A check that does not pass, or a significant loss against the baseline, is no error here: see `parity.passed` and
    the verdicts in `baseline`.
    """
    from hvdkit.commands import compare as compare_
    from hvdkit.commands.parity import ParityPlan
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import ComparisonProgress, StageProgress
    from hvdkit.runtimes.pins import FRAMEWORKS
    from hvdkit.tracking import trackers as tracking

    began = time.monotonic()
    trackers = tracking.check(listed(log))
    loaded = _loaded(recipe, overrides, extra=tracking.overrides(trackers))
    names, rivals, nps = listed(framework) or list(FRAMEWORKS), listed(rival), wholes(np) or list(COMPARED_RANKS)
    if resume and out is None:
        raise RequestError("--resume: expected --out with the comparison's folder")
    placement = Placement(launcher=launcher, stall_timeout_s=stall_timeout, debug=debug)
    schedule = compare_.schedule(loaded, names, nps, placement, rivals, rounds)
    proof = compare_.proof(loaded, names, as_path(parity), no_parity, placement, rivals)
    old = compare_.earlier(Path(baseline), margin, loaded, schedule.plans) if baseline else None
    place = as_path(out) or paths.default_out(loaded.name, "compare")
    inputs = [loaded.model.weights, as_path(baseline), as_path(parity)]
    dry = ("of_comparison", loaded, schedule, proof, place)
    with _claimed(place, overwrite, resume, inputs, dry) as folder:
        _say([*compare_.left_out(rivals, names, nps), *max(schedule.plans, key=lambda plan: plan.np).warnings])
        if isinstance(proof, ParityPlan):
            with StageProgress("parity", len(proof.plans), began) as stages:
                proof = compare_.prove(proof, folder, stages.begin, resume)
        runs = [(number, plan.title, plan.np) for number, plan in schedule]
        with ComparisonProgress(runs, loaded.steps is None, began) as progress:
            comparison = compare_.run(
                schedule, proof, folder, lambda number, plan: progress.watch(plan.title, number), old, resume
            )
        compare_.log(schedule, folder, trackers, _line)
        return comparison.at(folder)


@checked
def parity(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: Names = None,
    steps: int = STEPS,
    np: int = PROFILED_RANKS,
    rival: Names = None,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Parity:
    """Check in float64, step by step, that frameworks compute what PyTorch computes.

    If one does not, `passed` of the result is false, which is no error.
    """
    from hvdkit.commands import parity as parity_
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import StageProgress
    from hvdkit.runtimes.pins import FRAMEWORKS

    loaded = _loaded(recipe, overrides)
    placement = Placement(operator.index(np), launcher=launcher, stall_timeout_s=stall_timeout)
    plan = parity_.plan(loaded, listed(framework) or list(FRAMEWORKS), steps, placement, listed(rival))
    place = as_path(out) or paths.default_out(loaded.name, "parity")
    with (
        _claimed(place, overwrite, inputs=[loaded.model.weights], dry=("of_parity", plan, place)) as folder,
        StageProgress("parity", len(plan.plans)) as progress,
    ):
        return parity_.run(plan, folder, progress.begin).at(folder)


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

    loaded = _loaded(recipe, overrides)
    placement = Placement(operator.index(np), joined(hosts), launcher, stall_timeout, debug=debug)
    plan = profile_.plan(loaded, framework, placement, steps, torch_profiler, wholes(batch_sizes))
    place = as_path(out) or paths.default_out(loaded.name, "profile")
    with _claimed(place, overwrite, inputs=[loaded.model.weights], dry=("of_profile", plan, place)) as folder:
        _say([*plan.left_out, *plan.plan.warnings])
        return profile_.run(plan, folder).at(folder)


@checked
def published_profile(
    model: str,
    *,
    images_per_second: float,
    batch_size: int,
    device: str,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile:
    """Make a profile for `predict` and `advise` from a published figure of one device; nothing is measured.

    `model` is one of hvdkit's ResNets, such as `resnet50`; `device` is a GPU's name, or `cpu`.
    """
    from hvdkit.commands import profile as profile_
    from hvdkit.profiling import published

    found = published.profile(model, images_per_second, operator.index(batch_size), device)
    with _claimed(as_path(out) or paths.default_out(found.recipe, "profile"), overwrite) as folder:
        return profile_.write(found, folder).at(folder)


@checked
def bench(
    collective: str,
    *,
    framework: str = FRAMEWORK,
    np: int = 2,
    hosts: Names = None,
    min_bytes: int = 4,
    max_bytes: int = 64 * 2**20,
    factor: float = 4.0,
    dtype: str = "float32",
    redop: str = "sum",
    seconds: float = 2.0,
    device: str = "auto",
    link_mbit_per_s: float | None = None,
    add_to: PathLike | None = None,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Bench:
    """Time a collective by size, check each element, and write a cluster file for `predict`.

    Wrong elements are no error: see `wrong` of the rows.
    """
    from hvdkit.commands import bench as bench_
    from hvdkit.launch.placement import Placement
    from hvdkit.report.bench import bench_plot, row_line

    placement, known = Placement(operator.index(np), joined(hosts), launcher, stall_timeout), as_path(add_to)
    plan = bench_.plan(
        collective, framework, placement, min_bytes, max_bytes, factor, dtype, redop, seconds, device, link_mbit_per_s,
        known,
    )  # fmt: skip
    place = as_path(out) or paths.default_out(collective, "bench")
    with _claimed(place, overwrite, inputs=[known]) as folder:
        _say([] if device == "gpu" or plan.runtime.gpu else placement.crowding)
        result = bench_.run(plan, folder, lambda row: _line(row_line(row)))
        bench_plot(result, bench_.measured(result), folder / "bench.png")
        return result.at(folder)


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

    path = _profile(profile)
    plan = predict_.plan(path, Path(cluster), wholes(ranks), texts("settings", settings), policy)
    place = as_path(out) or paths.default_out(plan.profile.recipe, "predict")
    with _claimed(place, overwrite, inputs=[path, Path(cluster)]) as folder:
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
    from hvdkit.simulator import sweep as sweep_

    path = _profile(profile)
    wanted = dict(grid) if isinstance(grid, Mapping) else sweep_.read(texts("grid", grid))
    answer = predict_.sweep(path, Path(cluster), wholes(ranks), wanted, texts("settings", settings), policy)
    place = as_path(out) or paths.default_out("sweep", "predict")
    with _claimed(place, overwrite, inputs=[path, Path(cluster)]) as folder:
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
    `price` and `budget` are in the cluster's currency; `deadline` is a time such as `36h`, `friday` or `2026-11-27`.
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
    path = None if isinstance(subject, Mapping) else _profile(subject)
    measured = path is not None and path.suffix == ".json"
    if measured and ranks is None and [name for name, value in of_recipes.items() if value] == ["-np"]:
        ranks, of_recipes = np, {}  # there is nothing to profile, so it can only mean the number of ranks
    question = predict_.question(links, wholes(ranks), texts("settings", settings), policy)
    if measured and path is not None:
        request = advise_.of_profile(path, question, of_recipes)
    else:
        if resume and out is None:
            raise RequestError("--resume: expected --out with the folder of an earlier hvdkit advise")
        recipe = _loaded(path or subject, overrides)  # type: ignore[arg-type]  # no profile
        request = advise_.of_recipe(recipe, question, framework, np, joined(hosts), steps, launcher, stall_timeout)
    place = as_path(out) or paths.default_out(request.name, "advise")
    with _claimed(place, overwrite, resume, [path, links]) as folder:
        plan = request.plan(folder)
        found = predict_.advise(
            plan, predict_.money(plan, price, images, epochs, budget, deadline_s, spot_interruption), folder
        )
        if target is not None:
            _say([f"{target}: the recipe with {predict_.apply(found, request.settings, target)}"])
        return found.at(folder)


def dry_run(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> DryRun:
    """What `train`, `compare`, `parity` or `profile` would start with these arguments; starts and writes nothing."""
    if getattr(function, "func", function) not in (train, compare, parity, profile):
        raise RequestError(f"dry_run: expected hvdkit's train, compare, parity or profile, got {function!r}")
    token = _dry.set(True)
    try:
        function(*arguments, **options)
    except _Described as end:
        return end.found
    finally:
        _dry.reset(token)
    raise AssertionError("a dry run went on")


class _Described(Exception):  # ends a dry run, and is no error
    def __init__(self, found: DryRun) -> None:
        super().__init__()
        self.found = found


@contextmanager
def _claimed(
    out: Path,
    overwrite: bool,
    resume: bool = False,
    inputs: Sequence[Path | str | None] = (),
    dry: tuple[Any, ...] = (),
) -> Iterator[Path]:
    """The folder `out` for this command.

    A dry run ends here. `dry` names the function of `commands.dry_run` that describes what would be started, and has
    its arguments.
    """
    if _dry.get():
        from hvdkit.commands import dry_run

        paths.check_free(out, overwrite, resume, inputs)
        name, *arguments = dry
        raise _Described(getattr(dry_run, name)(*arguments))
    with paths.claimed(out, overwrite, resume, inputs) as folder:
        yield folder


def _loaded(recipe: AnyRecipe, overrides: Settings, resumed: Path | None = None, extra: Sequence[str] = ()) -> Recipe:
    from hvdkit.commands.loading import load

    given = copy.deepcopy(dict(recipe)) if isinstance(recipe, Mapping) else Path(recipe)
    found, lines = load(given, [*texts("overrides", overrides), *extra], resumed, OVERRIDES_FROM.get())
    _say(lines)
    return found


def _profile(profile: PathLike | Profile) -> Path:
    """The file of a profile that is given as a path or as the result of `profile`."""
    from hvdkit.results.profile import Profile

    return profile.folder / "profile.json" if isinstance(profile, Profile) else Path(profile)


def _line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # `sys.stderr` is what a progress bar has put in its place


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        _line(line)
