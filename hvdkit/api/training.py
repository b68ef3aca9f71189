"""A model trained, and what is done with it: `train`, `evaluate`, `predict_images`, `generate`, `export`, `diff`."""

from __future__ import annotations

import operator
import shlex
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit import paths
from hvdkit.api.calls import claimed, load_recipe, say, show_line
from hvdkit.arguments import (
    AnyRecipe,
    Names,
    PathLike,
    Paths,
    Settings,
    as_path,
    as_paths,
    checked,
    joined,
    listed,
    texts,
)
from hvdkit.defaults import BEGAN, LAUNCHER, OVERRIDES_FROM, STALL_TIMEOUT_S
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.results.diff import Diff
    from hvdkit.results.evaluate import EvaluationResult
    from hvdkit.results.generate import Generation
    from hvdkit.results.predict_images import ImagePredictions
    from hvdkit.results.train import TrainResult


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
    loaded = load_recipe(recipe, overrides, as_path(out) if resume else None, tracking.overrides(names))
    if resume and (out is None or loaded.checkpoint is None):
        raise RequestError("--resume: expected --out with the run's folder, and a recipe without `checkpoint: null`")
    discovery = as_path(host_discovery_script)
    placement = Placement(operator.index(np), joined(hosts), launcher, stall_timeout, discovery, debug)
    framework = framework or (train_.writer(Path(out)) if resume and out else None)
    plan = replace(make_plan(loaded, framework, placement, rival), began=began)
    target = as_path(out) or paths.default_out(loaded.name, "train")
    with claimed(target, overwrite, resume, [loaded.model.weights], dry=("of_train", plan, target, resume)) as folder:
        if loaded.checkpoint and out is None:
            again = f"--out {shlex.quote(str(target))} --resume"
            say([f"no --out: checkpoints go to {target}; {again} continues from them"])
        say([*plan.warnings, *plan.unreached])
        with RunProgress([plan.title]) as progress, tracking.Trackers(names, show_line) as trackers:
            result = train_.run(plan, folder, progress.watch(plan.title), resume, trackers)
    say(doubts(result))
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
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> EvaluationResult:
    """Evaluate a checkpoint, under its own framework or another; of a run's folder the best one, else the last.

    With `average` they are the averaged weights, if the checkpoint has any (also in the functions below).
    """
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import evaluate as evaluate_
    from hvdkit.launch.placement import Placement

    located = locate(paths.settled(Path(checkpoint)))
    placement = Placement(operator.index(np), launcher=launcher, stall_timeout_s=stall_timeout)
    plan = evaluate_.plan(located, texts("overrides", overrides), framework, placement, OVERRIDES_FROM.get())
    if out and paths.lies_in(located, Path(out)):
        raise RequestError(f"--out {out}: the checkpoint lies in it; choose another folder")
    with claimed(as_path(out) or paths.default_out(plan.recipe.name, "evaluate"), overwrite) as folder:
        say(plan.warnings)
        return evaluate_.run(plan, located, folder, average)


@checked
def predict_images(
    checkpoint: PathLike,
    images: Paths,
    *,
    framework: str | None = None,
    top: int = 3,
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> ImagePredictions:
    """Say what is in pictures: the `top` most probable classes of each, by a run's or a checkpoint's model.

    `images` are JPEG or PNG files, or folders of them. Without `out` nothing is written.
    """
    from hvdkit.commands import predict_images as predict_images_

    request = predict_images_.check(paths.settled(Path(checkpoint)), as_paths(images), framework, operator.index(top))
    say(request.left_out)
    inputs = [Path(checkpoint), *as_paths(images)]
    with claimed(Path(out), overwrite, inputs=inputs) if out else nullcontext() as folder:
        classes = predict_images_.run(request, folder, average)
        return classes.at(folder) if folder else classes


@checked
def generate(
    checkpoint: PathLike,
    prompt: str,
    *,
    framework: str | None = None,
    tokens: int = 200,
    average: bool = True,
    out: PathLike | None = None,
    overwrite: bool = False,
) -> Generation:
    """Go on with a text: a run's or a checkpoint's language model adds the most probable token again and again.

    Without `out` nothing is written.
    """
    from hvdkit.commands import generate as generate_

    request = generate_.check(paths.settled(Path(checkpoint)), prompt, framework, operator.index(tokens))
    with claimed(Path(out), overwrite, inputs=[Path(checkpoint)]) if out else nullcontext() as folder:
        generation = generate_.run(request, folder, average)
        return generation.at(folder) if folder else generation


@checked
def export(checkpoint: PathLike, out: PathLike, *, average: bool = True, overwrite: bool = False) -> Path:
    """Write a model as one file, FILE.safetensors, FILE.onnx or FILE.keras; returns its absolute path.

    Of a run's folder it is the best checkpoint's, else the last one's.
    """
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import export as export_

    plan = export_.plan(locate(paths.settled(Path(checkpoint))), Path(out), overwrite, average)
    export_.run(plan)
    return plan.out


@checked
def diff(first: PathLike, second: PathLike, *, out: PathLike | None = None, overwrite: bool = False) -> Diff:
    """What differs between two runs: settings, versions, the first step with another loss, weights.

    `same` of the result says whether the training is. Without `out` nothing is written.
    """
    from hvdkit.commands import diff as diff_
    from hvdkit.files import write_atomic
    from hvdkit.results.diff import FILE

    runs = [Path(first), Path(second)]
    difference = diff_.run(*runs)
    if not out:
        return difference
    with claimed(Path(out), overwrite, inputs=runs) as folder:
        write_atomic(folder / FILE, difference.model_dump_json(indent=2) + "\n")
        return difference.at(folder)
