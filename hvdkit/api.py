"""hvdkit's commands as functions, such as `hvdkit.train("resnet20-digits", np=2)` (docs/python.md).

Each takes the options of the command of its name, and returns what that command writes. They show progress on standard
error, or in the notebook. Besides the errors named below they raise RequestError for a wrong request, with all its
faults and before anything starts; RunError if a run fails; and KeyboardInterrupt on Ctrl-C, once all ranks have ended.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit import paths
from hvdkit.defaults import COMPARED_RANKS, FRAMEWORK, LAUNCHER, MARGIN, PROFILED_RANKS, STALL_TIMEOUT_S, STEPS
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.recipe.schema import Recipe
    from hvdkit.results.compare import Comparison
    from hvdkit.results.evaluate import EvaluationResult
    from hvdkit.results.parity import Parity
    from hvdkit.results.profile import Profile
    from hvdkit.results.train import TrainResult
    from hvdkit.simulator.advise import Advice
    from hvdkit.simulator.predict import Prediction

PathLike = str | os.PathLike[str]
AnyRecipe = PathLike | Mapping[str, Any]  # a file, a name from `hvdkit recipes list`, or the content of a file
Settings = Mapping[str, Any] | Iterable[str] | None  # {"epochs": 2} or ["epochs=2"]; dots lead to nested keys
Names = str | Iterable[str] | None  # one or several


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

    began = time.time()
    names = tracking.check(_list(log))
    checked = _loaded(recipe, overrides, _path(out) if resume else None, tracking.overrides(names))
    if resume and (out is None or checked.checkpoint is None):
        raise RequestError("--resume: expected --out with the run's folder, and a recipe without `checkpoint: null`")
    discovery = _path(host_discovery_script)
    placement = Placement(_whole("np", np), _joined(hosts), launcher, stall_timeout, discovery)
    framework = framework or (train_.writer(Path(out)) if resume and out else None)
    plan = replace(make_plan(checked, framework, placement, rival), began=began)
    with (
        _claimed(out, checked.name, "train", overwrite, resume, [checked.model.weights]) as folder,
        RunProgress([plan.title]) as progress,
        tracking.Trackers(names, lambda line: _say([line])) as trackers,
    ):
        _say(plan.warnings)
        result = train_.run(plan, folder, progress.watch(plan.title), resume, trackers)
    _say(doubts(result))
    return result


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
    placement = Placement(_whole("np", np), launcher=launcher, stall_timeout_s=stall_timeout)
    plan = evaluate_.plan(found, _texts("overrides", overrides), framework, placement)
    if out and paths.lies_in(found, Path(out)):
        raise RequestError(f"--out {out}: the checkpoint lies in it; choose another folder")
    with _claimed(out, plan.recipe.name, "evaluate", overwrite) as folder:
        return evaluate_.run(plan, found, folder)


def export(checkpoint: PathLike, out: PathLike, *, overwrite: bool = False) -> Path:
    """Write a model as one file, FILE.safetensors, FILE.onnx or FILE.keras; returns its absolute path.

    Of a run's folder it is the best checkpoint's, else the last one's.
    """
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import export as export_

    plan = export_.plan(locate(Path(checkpoint)), Path(out), overwrite)
    export_.run(plan)
    return plan.out


def compare(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: Names = None,
    np: int | Iterable[int] | None = None,
    parity: PathLike | None = None,
    no_parity: bool = False,
    rival: Names = None,
    rounds: int | None = None,
    baseline: PathLike | None = None,
    margin: float = MARGIN,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    out: PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
    log: Names = None,
) -> Comparison:
    """Prove that frameworks (all four, or those named) do the same work, train a recipe under each, on 1 and 2 ranks
    or as many as `np` says, and compare the results.

    A proof that does not pass, or a significant loss against the baseline, is no error here: see `parity.passed` and
    the verdicts in `baseline`.
    """
    from hvdkit.commands import compare as compare_
    from hvdkit.commands.parity import ParityPlan
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import ComparisonProgress, StageProgress
    from hvdkit.runtimes.pins import FRAMEWORKS
    from hvdkit.tracking import trackers as tracking

    began = time.monotonic()
    trackers = tracking.check(_list(log))
    checked = _loaded(recipe, overrides, extra=tracking.overrides(trackers))
    names, rivals = _list(framework) or list(FRAMEWORKS), _list(rival)
    nps = [_whole("np", each) for each in ([np] if isinstance(np, int) else np or COMPARED_RANKS)]
    if resume and out is None:
        raise RequestError("--resume: expected --out with the comparison's folder")
    placement = Placement(launcher=launcher, stall_timeout_s=stall_timeout)
    schedule = compare_.schedule(checked, names, nps, placement, rivals, rounds)
    proof = compare_.proof(checked, names, _path(parity), no_parity, placement, rivals)
    old = compare_.earlier(Path(baseline), margin, checked, schedule.plans) if baseline else None
    inputs = [checked.model.weights, _path(baseline), _path(parity)]
    with _claimed(out, checked.name, "compare", overwrite, resume, inputs) as folder:
        _say([*compare_.left_out(rivals, names, nps), *max(schedule.plans, key=lambda plan: plan.np).warnings])
        if isinstance(proof, ParityPlan):
            with StageProgress("parity", len(proof.plans), began) as stages:
                proof = compare_.prove(proof, folder, stages.begin, resume)
        runs = [(number, plan.title, plan.np) for number, plan in schedule]
        with ComparisonProgress(runs, checked.steps is None, began) as progress:
            comparison = compare_.run(
                schedule, proof, folder, lambda number, plan: progress.watch(plan.title, number), old, resume
            )
        compare_.log(schedule, folder, trackers, lambda line: _say([line]))
        return comparison.at(folder)


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
    """Prove in float64, step by step, that frameworks compute what PyTorch computes.

    If one does not, `passed` of the result is false, which is no error.
    """
    from hvdkit.commands import parity as parity_
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import StageProgress
    from hvdkit.runtimes.pins import FRAMEWORKS

    checked = _loaded(recipe, overrides)
    placement = Placement(_whole("np", np), launcher=launcher, stall_timeout_s=stall_timeout)
    plan = parity_.plan(checked, _list(framework) or list(FRAMEWORKS), steps, placement, _list(rival))
    with (
        _claimed(out, checked.name, "parity", overwrite, inputs=[checked.model.weights]) as folder,
        StageProgress("parity", len(plan.plans)) as progress,
    ):
        return parity_.run(plan, folder, progress.begin).at(folder)


def profile(
    recipe: AnyRecipe,
    overrides: Settings = None,
    *,
    framework: str = FRAMEWORK,
    np: int = PROFILED_RANKS,
    hosts: Names = None,
    steps: int = STEPS,
    torch_profiler: bool = False,
    launcher: str = LAUNCHER,
    stall_timeout: float = STALL_TIMEOUT_S,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Profile:
    """Measure where the time of a step goes, by layer and by rank."""
    from hvdkit.commands import profile as profile_
    from hvdkit.launch.placement import Placement

    checked = _loaded(recipe, overrides)
    placement = Placement(_whole("np", np), _joined(hosts), launcher, stall_timeout)
    plan = profile_.plan(checked, framework, placement, steps, torch_profiler)
    with _claimed(out, checked.name, "profile", overwrite, inputs=[checked.model.weights]) as folder:
        for line in plan.left_out:
            print(line, file=sys.stderr)
        return profile_.run(plan, folder).at(folder)


def predict(
    profile: PathLike | Profile,
    *,
    cluster: PathLike,
    ranks: int | Iterable[int],
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
    numbers = [_whole("ranks", each) for each in ([ranks] if isinstance(ranks, int) else ranks)]
    plan = predict_.plan(path, Path(cluster), numbers, _texts("settings", settings), policy)
    with _claimed(out, plan.profile.recipe, "predict", overwrite, inputs=[path, Path(cluster)]) as folder:
        return predict_.predict(plan, folder).at(folder)


def advise(
    subject: AnyRecipe | Profile,
    overrides: Settings = None,
    *,
    cluster: PathLike | None = None,
    ranks: int | None = None,
    price: float | None = None,
    images: int | None = None,
    epochs: int | None = None,
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
    With `apply`, a file, the recipe with the largest certain gain is written there.
    """
    from hvdkit.commands import advise as advise_
    from hvdkit.commands import predict as predict_

    of_recipes = {
        "key=value": overrides, "--framework": framework, "-np": np, "-H": hosts, "--steps": steps,
        "--launcher": launcher, "--stall-timeout": stall_timeout, "--resume": resume,
    }  # fmt: skip
    target, links = _path(apply), _path(cluster)
    predict_.check(price, target)
    question = predict_.question(links, [] if ranks is None else [ranks], _texts("settings", settings), policy)
    path = None if isinstance(subject, Mapping) else _profile(subject)
    if path is not None and path.suffix == ".json":
        request = advise_.of_profile(path, question, of_recipes)
    else:
        if resume and out is None:
            raise RequestError("--resume: expected --out with the folder of an earlier hvdkit advise")
        recipe = _loaded(path or subject, overrides)  # type: ignore[arg-type]
        request = advise_.of_recipe(recipe, question, framework, np, _joined(hosts), steps, launcher, stall_timeout)
    with _claimed(out, request.name, "advise", overwrite, resume, [path, links]) as folder:
        plan = request.plan(folder)
        found = predict_.advise(plan, predict_.money(plan, price, images, epochs), folder)
        if target is not None:
            predict_.apply(found, request.settings, target)
        return found.at(folder)


def _loaded(recipe: AnyRecipe, overrides: Settings, resumed: Path | None = None, extra: Sequence[str] = ()) -> Recipe:
    from hvdkit.commands.loading import load

    given = copy.deepcopy(dict(recipe)) if isinstance(recipe, Mapping) else Path(recipe)
    checked, lines = load(given, [*_texts("overrides", overrides), *extra], resumed)
    _say(lines)
    return checked


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _texts(name: str, settings: Settings) -> list[str]:
    """The settings as `key=value`, with values in JSON, which is YAML. Raises RequestError for what has no JSON."""
    if isinstance(settings, str):
        raise RequestError(f"{name}: expected a dictionary, or a list such as [{settings!r}], got a text")
    if not isinstance(settings, Mapping):
        return _list(settings)
    texts = []
    for key, value in settings.items():
        try:
            texts.append(f"{key}={json.dumps(value, ensure_ascii=False, default=_plain)}")
        except (TypeError, ValueError) as error:
            raise RequestError(f"{name}: {key}: expected a number, text, list or dictionary ({error})") from None
    return texts


def _plain(value: Any) -> Any:
    """A path as text, NumPy's numbers and arrays as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    raise TypeError(f"got {type(value).__name__}")


def _profile(profile: PathLike | Profile) -> Path:
    """The file of a profile that is given as a path or as the result of `profile`."""
    from hvdkit.results.profile import Profile

    return profile.folder / "profile.json" if isinstance(profile, Profile) else Path(profile)


def _list(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def _joined(hosts: Names) -> str | None:
    return ",".join(_list(hosts)) or None


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _whole(name: str, number: int) -> int:
    if not isinstance(number, int):
        raise RequestError(f"{name}: expected a whole number, got {number!r}")
    return number


def _claimed(
    out: PathLike | None,
    name: str,
    command: str,
    overwrite: bool,
    resume: bool = False,
    inputs: Sequence[Path | str | None] = (),
) -> AbstractContextManager[Path]:
    """The folder `out`, or else a new one below `runs`, for this command."""
    return paths.claimed(_path(out) or paths.default_out(name, command), overwrite, resume, inputs)
