"""The command line. A command parses its options and calls a module of `commands`, imported when it is needed."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli import bench, completion, help, images, predict, setting_up
from hvdkit.cli import terminal as console
from hvdkit.cli.options import (
    RIVALS,
    App,
    DryRun,
    Framework,
    Frameworks,
    Hosts,
    Json,
    Launcher,
    Log,
    Overrides,
    Overwrite,
    Ranks,
    RecipeFile,
    Rivals,
    StallTimeout,
    TrainedFramework,
    WritersFramework,
    loaded,
    preview,
    show,
    stderr,
    warn,
)
from hvdkit.defaults import COMPARED_RANKS, FRAMEWORK, LAUNCHER, MARGIN, PROFILED_RANKS, STALL_TIMEOUT_S, STEPS
from hvdkit.errors import RequestError

app = App(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="One ResNet recipe under PyTorch, TensorFlow, Keras and MXNet over real Horovod.",
)

CheckpointFolder = Annotated[Path, typer.Argument(metavar="CHECKPOINT_DIR", help="RUN, or a checkpoint of it")]
Out = Annotated[Path | None, typer.Option(help="the run's folder", show_default="runs/<recipe>-<command>-<time>")]


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    framework: TrainedFramework = None,
    np: Ranks = 1,
    hosts: Hosts = None,
    rival: Annotated[
        str | None, typer.Option(help="train with another method: " + RIVALS, autocompletion=completion.rivals)
    ] = None,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint in --out")] = False,
    host_discovery_script: Annotated[
        Path | None, typer.Option(help="a program that prints one host:slots per line, for elastic runs")
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
    log: Log = None,
) -> None:
    """Train a recipe under one framework."""
    from hvdkit import paths
    from hvdkit.commands import train as train_
    from hvdkit.commands.plan import make_plan
    from hvdkit.core.usage import process_began
    from hvdkit.launch.placement import Placement
    from hvdkit.report.progress import RunProgress
    from hvdkit.tracking import trackers as tracking

    names = tracking.check(log or [])
    checked = loaded(recipe, [*(overrides or []), *tracking.overrides(names)], out if resume else None)
    if resume and (out is None or checked.checkpoint is None):
        raise RequestError("--resume: expected --out with the run's folder, and a recipe without `checkpoint: null`")
    placement = Placement(np, hosts, launcher, stall_timeout, host_discovery_script)
    framework = framework or (train_.writer(out) if resume and out else None)
    plan = replace(make_plan(checked, framework, placement, rival), began=process_began())
    named, out = out is not None, out or paths.default_out(checked.name, "train")
    claim = (out, overwrite, resume, [checked.model.weights])
    if dry_run:
        return preview(claim, json, "of_train", plan, out, resume)
    with paths.claimed(*claim) as folder:
        if checked.checkpoint and not named:
            warn([f"no --out: checkpoints go to {out}; --out {out} --resume goes on from them"])
        warn(plan.warnings)
        with RunProgress([plan.title]) as progress, tracking.Trackers(names, stderr) as trackers:
            result = train_.run(plan, folder, progress.watch(plan.title), resume, trackers)
        from hvdkit.results.train import doubts, kept_lines, result_lines

        warn(doubts(result))
        lines = [result_lines(result), *kept_lines(result, out), f"written to {folder}"]
        if checked.data.name == "imagefolder" and result.checkpoints:
            lines.append(f"what is in a picture: {shlex.join(['hvdkit', 'predict-images', str(out), 'PICTURE.jpg'])}")
        typer.echo("\n".join(lines))


@app.command()
def evaluate(
    checkpoint: CheckpointFolder,
    overrides: Overrides = None,
    framework: WritersFramework = None,
    np: Ranks = 1,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Evaluate a checkpoint, under the framework that trained it or another one."""
    from hvdkit import paths
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import evaluate as evaluate_
    from hvdkit.launch.placement import Placement

    checkpoint = locate(checkpoint)
    placement = Placement(np, launcher=launcher, stall_timeout_s=stall_timeout)
    plan = evaluate_.plan(checkpoint, overrides or [], framework, placement)
    if out and paths.lies_in(checkpoint, out):
        raise RequestError(f"--out {out}: the checkpoint lies in it; choose another folder")
    with paths.claimed(out or paths.default_out(plan.recipe.name, "evaluate"), overwrite) as folder:
        result = evaluate_.run(plan, checkpoint, folder)
        typer.echo(result.line)
        typer.echo(f"written to {folder / 'evaluate.json'}")


@app.command()
def export(
    checkpoint: CheckpointFolder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="FILE.safetensors, FILE.onnx or FILE.keras")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file")] = False,
) -> None:
    """Write a checkpoint's model as one file for others: safetensors, ONNX or a Keras archive."""
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import export as export_

    checkpoint = locate(checkpoint)
    _, *beside = export_.run(export_.plan(checkpoint, out, overwrite))
    typer.echo(f"{checkpoint}: written to {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    for path in beside:
        typer.echo(f"{path.name} beside it loads it: from {path.stem} import load; model = load({out.name!r})")


@app.command()
def compare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    framework: Frameworks = None,
    np: Annotated[
        list[int] | None, typer.Option("-np", "--np", "-n", help="may be repeated", show_default="1 and 2")
    ] = None,
    parity: Annotated[Path | None, typer.Option(help="the parity.json of an earlier `hvdkit parity`")] = None,
    no_parity: Annotated[bool, typer.Option("--no-parity", help="do not check that all do the same work")] = False,
    rival: Rivals = None,
    rounds: Annotated[
        int | None, typer.Option(help="number of runs of each kind", show_default="1, with rivals 3")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="the compare.json of an earlier `hvdkit compare`")] = None,
    margin: Annotated[
        float, typer.Option(help="a significant loss against the baseline of more than this gives status 1")
    ] = MARGIN,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="keep the whole rounds that are in --out")] = False,
    dry_run: DryRun = False,
    json: Json = False,
    log: Log = None,
) -> None:
    """Prove that several frameworks do the same work, train a recipe under each, and compare the results."""
    from hvdkit import paths
    from hvdkit.commands import compare as compare_
    from hvdkit.commands.parity import ParityPlan
    from hvdkit.launch.placement import Placement
    from hvdkit.report.compare import comparison_tables
    from hvdkit.report.parity import deviations
    from hvdkit.report.progress import ComparisonProgress, StageProgress
    from hvdkit.runtimes.pins import FRAMEWORKS
    from hvdkit.tracking import trackers as tracking

    began = time.monotonic()
    trackers = tracking.check(log or [])
    checked = loaded(recipe, [*(overrides or []), *tracking.overrides(trackers)])
    names, nps, rivals = framework or list(FRAMEWORKS), np or list(COMPARED_RANKS), rival or []
    if resume and out is None:
        raise RequestError("--resume: expected --out with the comparison's folder")
    placement = Placement(launcher=launcher, stall_timeout_s=stall_timeout)
    schedule = compare_.schedule(checked, names, nps, placement, rivals, rounds)
    proof = compare_.proof(checked, names, parity, no_parity, placement, rivals)
    old = compare_.earlier(baseline, margin, checked, schedule.plans) if baseline else None
    out = out or paths.default_out(checked.name, "compare")
    claim = (out, overwrite, resume, [checked.model.weights, baseline, parity])
    if dry_run:
        return preview(claim, json, "of_comparison", checked, schedule, proof, out)
    with paths.claimed(*claim) as folder:
        warn([*compare_.left_out(rivals, names, nps), *max(schedule.plans, key=lambda plan: plan.np).warnings])
        if isinstance(proof, ParityPlan):
            with StageProgress("parity", len(proof.plans), began) as stages:
                proof = compare_.prove(proof, folder, stages.begin, resume)
        runs = [(number, plan.title, plan.np) for number, plan in schedule]
        with ComparisonProgress(runs, checked.steps is None, began) as progress:
            comparison = compare_.run(
                schedule, proof, folder, lambda number, plan: progress.watch(plan.title, number), old, resume
            )
        compare_.log(schedule, folder, trackers, stderr)
        show(comparison_tables(comparison), 160)
        lines = deviations(proof) if proof else []
        typer.echo("\n".join([*lines, f"written to {folder / 'compare.json'}, .csv and .md"]))
    lost = any(row.verdict == "worse" for row in comparison.baseline or [])
    raise typer.Exit(1 if lost or (proof is not None and not proof.passed) else 0)


@app.command()
def parity(
    recipe: RecipeFile,
    overrides: Overrides = None,
    framework: Frameworks = None,
    steps: Annotated[int, typer.Option(help="steps to compare one by one")] = STEPS,
    np: Ranks = PROFILED_RANKS,
    rival: Rivals = None,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    out: Out = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Prove in float64, step by step, that frameworks compute what PyTorch computes; status 1 if one does not."""
    from hvdkit import paths
    from hvdkit.commands import parity as parity_
    from hvdkit.launch.placement import Placement
    from hvdkit.report.parity import deviations, parity_table, title
    from hvdkit.report.progress import StageProgress
    from hvdkit.report.tabular import terminal
    from hvdkit.runtimes.pins import FRAMEWORKS

    checked = loaded(recipe, overrides)
    placement = Placement(np, launcher=launcher, stall_timeout_s=stall_timeout)
    plan = parity_.plan(checked, framework or list(FRAMEWORKS), steps, placement, rival)
    out = out or paths.default_out(checked.name, "parity")
    claim = (out, overwrite, False, [checked.model.weights])
    if dry_run:
        return preview(claim, json, "of_parity", plan, out)
    with paths.claimed(*claim) as folder:
        with StageProgress("parity", len(plan.plans)) as progress:
            result = parity_.run(plan, folder, progress.begin)
        show([terminal(parity_table(result), title(result), wrap_from=2)], max(120, 60 + 24 * len(result.frameworks)))
        verdict = "passed" if result.passed else "NOT PASSED"
        written = f"{verdict}; written to {folder / 'parity.json'}, .csv, .md and .png"
        typer.echo("\n".join([*deviations(result), written]))
    raise typer.Exit(0 if result.passed else 1)


for command in (images.predict_images, bench.bench, predict.predict, predict.advise):
    app.command()(command)


@app.command()
def profile(
    recipe: RecipeFile,
    overrides: Overrides = None,
    framework: Framework = FRAMEWORK,
    np: Ranks = PROFILED_RANKS,
    hosts: Hosts = None,
    steps: Annotated[int, typer.Option(help="steps to measure")] = STEPS,
    torch_profiler: Annotated[bool, typer.Option("--torch-profiler", help="write PyTorch's own profile too")] = False,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    out: Out = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Measure where the time of a step goes, by layer and by rank, and show what bounds it."""
    from hvdkit import paths
    from hvdkit.commands import profile as profile_
    from hvdkit.launch.placement import Placement
    from hvdkit.report.profile import sentences, tables

    checked = loaded(recipe, overrides)
    placement = Placement(np, hosts, launcher, stall_timeout)
    plan = profile_.plan(checked, framework, placement, steps, torch_profiler)
    out = out or paths.default_out(checked.name, "profile")
    claim = (out, overwrite, False, [checked.model.weights])
    if dry_run:
        return preview(claim, json, "of_profile", plan, out)
    with paths.claimed(*claim) as folder:
        warn([*plan.left_out, *plan.plan.warnings])
        found = profile_.run(plan, folder)
        show(tables(found), 100)
        written = f"written to {folder / profile_.FILE}, {profile_.TRACE} and {profile_.PICTURE}"
        typer.echo("\n".join([*sentences(found), written]))


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", readable=False, help="the output folder of `hvdkit compare` or `hvdkit train`"),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="where to write it", show_default="DIR")] = None,
) -> None:
    """Make one page of a comparison or a run, report.html, and report.md for pull requests."""
    from hvdkit.report import page

    for path in page.write(folder, out):
        typer.echo(f"written to {path}")


app.command()(setting_up.doctor)
app.add_typer(setting_up.runtime_app, name="runtime")
app.add_typer(setting_up.horovod_app, name="horovod")
app.add_typer(setting_up.recipes_app, name="recipes")


def _version(asked: bool) -> None:
    if asked:
        import hvdkit

        typer.echo(f"hvdkit {hvdkit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options without a command; `--version` is read before a missing command is reported."""


def main(own_process: bool = False) -> None:
    """Entry point: reports every error on standard error and exits with its status.

    With `own_process` the command has the process to itself and sets its signal handlers.
    """
    try:
        console.prepare()
        console.end_on_signals(own_process)
        if help.asked() and not completion.asked():
            help.prepare()
        app()
    except BaseException as end:
        if own_process:
            console.forget_signals()
        status = console.ended(end)
    sys.exit(status)
