"""The command line. A command parses its options, calls the function of its name in `api`, and prints the result."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli import completion, diff, help, images, memory, predict, published, setting_up, submit, text
from hvdkit.cli import terminal as console
from hvdkit.cli.generated import Lazy
from hvdkit.cli.options import (
    RIVALS,
    App,
    BatchSizes,
    Debug,
    DryRun,
    Framework,
    Frameworks,
    Hosts,
    Json,
    Launcher,
    Log,
    NoAverage,
    OptionalRecipe,
    Overrides,
    Overwrite,
    Ranks,
    RecipeFile,
    Rivals,
    StallTimeout,
    TrainedFramework,
    WritersFramework,
    preview,
    relative,
    show,
    whole_numbers,
)
from hvdkit.commands import COMMANDS
from hvdkit.defaults import BEGAN, FRAMEWORK, LAUNCHER, MARGIN, PROFILED_RANKS, STALL_TIMEOUT_S, STEPS
from hvdkit.errors import RequestError

app = App(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="One recipe, for a ResNet or a GPT, under PyTorch, TensorFlow, Keras and MXNet over real Horovod.",
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
    debug: Debug = False,
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
    from hvdkit import api
    from hvdkit.recipe import schema
    from hvdkit.results.train import kept_lines, result_lines
    from hvdkit.usage import process_began

    BEGAN.set(process_began())
    call = partial(
        api.train, recipe, overrides, framework=framework, np=np, hosts=hosts, rival=rival, launcher=launcher,
        stall_timeout=stall_timeout, debug=debug, out=out, overwrite=overwrite, resume=resume,
        host_discovery_script=host_discovery_script, log=log,
    )  # fmt: skip
    if dry_run:
        return preview(call, json)
    result = call()
    shown = out or relative(result.folder)
    lines = [result_lines(result), *kept_lines(result, shown), f"written to {result.folder}"]
    if result.checkpoints and schema.load(result.folder / "config.yaml").data.name == "imagefolder":
        lines.append(f"what is in a picture: {shlex.join(['hvdkit', 'predict-images', str(shown), 'PICTURE.jpg'])}")
    typer.echo("\n".join(lines))


@app.command()
def evaluate(
    checkpoint: CheckpointFolder,
    overrides: Overrides = None,
    framework: WritersFramework = None,
    np: Ranks = 1,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    no_average: NoAverage = False,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Evaluate a checkpoint, under the framework that trained it or another one."""
    from hvdkit import api

    result = api.evaluate(
        checkpoint, overrides, framework=framework, np=np, launcher=launcher, stall_timeout=stall_timeout,
        average=not no_average, out=out, overwrite=overwrite,
    )  # fmt: skip
    typer.echo(result.line)
    typer.echo(f"written to {result.folder / 'evaluate.json'}")


@app.command()
def export(
    checkpoint: CheckpointFolder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="FILE.safetensors, FILE.onnx or FILE.keras")],
    no_average: NoAverage = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file")] = False,
) -> None:
    """Write a checkpoint's model as one file for others: safetensors, ONNX or a Keras archive."""
    from hvdkit.checkpoint.snapshots import locate
    from hvdkit.commands import export as export_
    from hvdkit.report.tabular import size

    checkpoint = locate(checkpoint)
    plan = export_.plan(checkpoint, out, overwrite, not no_average)
    _, *beside = export_.run(plan)
    what = "averaged weights written" if plan.averaged else "written"
    typer.echo(f"{checkpoint}: {what} to {out} ({size(out.stat().st_size)})")
    for path in beside:
        if path.suffix == ".py":
            typer.echo(f"{path.name} beside it loads it: from {path.stem} import load; model = load({out.name!r})")
    if any(path.name == "config.json" for path in beside):
        names = " and ".join(path.name for path in beside)
        typer.echo(f"{names} beside it; transformers loads it: GPT2LMHeadModel.from_pretrained({str(out.parent)!r})")


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
        int | None, typer.Option(help="number of runs of each kind", show_default="1, with --rival 3")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="the compare.json of an earlier `hvdkit compare`")] = None,
    margin: Annotated[
        float, typer.Option(help="a significant loss against the baseline of more than this gives status 1")
    ] = MARGIN,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    debug: Debug = False,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="keep the whole rounds that are in --out")] = False,
    dry_run: DryRun = False,
    json: Json = False,
    log: Log = None,
) -> None:
    """Check that several frameworks do the same work, train a recipe under each, and compare the results."""
    from hvdkit import api
    from hvdkit.report.compare import comparison_tables
    from hvdkit.report.parity import deviations

    call = partial(
        api.compare, recipe, overrides, framework=framework, np=np, parity=parity, no_parity=no_parity, rival=rival,
        rounds=rounds, baseline=baseline, margin=margin, launcher=launcher, stall_timeout=stall_timeout, debug=debug,
        out=out, overwrite=overwrite, resume=resume, log=log,
    )  # fmt: skip
    if dry_run:
        return preview(call, json)
    comparison = call()
    show(comparison_tables(comparison), 160)
    lines = deviations(comparison.parity) if comparison.parity else []
    typer.echo("\n".join([*lines, f"written to {comparison.folder / 'compare.json'}, .csv and .md"]))
    lost = any(row.verdict == "worse" for row in comparison.baseline or [])
    raise typer.Exit(1 if lost or (comparison.parity and not comparison.parity.passed) else 0)


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
    """Check in float64, step by step, that frameworks compute what PyTorch computes; status 1 if one does not."""
    from hvdkit import api
    from hvdkit.report.parity import deviations, parity_table, title
    from hvdkit.report.tabular import terminal

    call = partial(
        api.parity, recipe, overrides, framework=framework, steps=steps, np=np, rival=rival, launcher=launcher,
        stall_timeout=stall_timeout, out=out, overwrite=overwrite,
    )  # fmt: skip
    if dry_run:
        return preview(call, json)
    result = call()
    show([terminal(parity_table(result), title(result), wrap_from=2)], max(120, 60 + 24 * len(result.frameworks)))
    verdict = "passed" if result.passed else "NOT PASSED"
    written = f"{verdict}; written to {result.folder / 'parity.json'}, .csv, .md and .png"
    typer.echo("\n".join([*deviations(result), written]))
    raise typer.Exit(0 if result.passed else 1)


for command in (
    images.predict_images,
    diff.diff,
    text.generate,
    submit.submit,
    predict.predict,
    predict.advise,
    memory.memory,
):
    app.command()(command)


for name, text_ in COMMANDS.items():
    app.command(name, help=text_, cls=Lazy)(lambda: None)


@app.command()
def profile(
    context: typer.Context,
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    framework: Framework = FRAMEWORK,
    np: Ranks = PROFILED_RANKS,
    hosts: Hosts = None,
    steps: Annotated[int, typer.Option(help="steps to measure")] = STEPS,
    torch_profiler: Annotated[bool, typer.Option("--torch-profiler", help="write PyTorch's own profile too")] = False,
    batch_sizes: BatchSizes = None,
    from_: published.From = None,
    images_per_second: published.ImagesPerSecond = None,
    tokens_per_second: published.TokensPerSecond = None,
    batch_size: published.BatchSize = None,
    device: published.Device = None,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    debug: Debug = False,
    out: Out = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Measure where the time of a step goes, by layer and by rank, and show what bounds it."""
    from hvdkit import api

    if published.asked(context):
        return published.profile(context)
    if recipe is None:
        raise RequestError("RECIPE.yaml: expected a recipe to measure, or --from with a published figure")
    from hvdkit.commands.profile import FILE, PICTURE, TRACE
    from hvdkit.report.profile import sentences, tables

    call = partial(
        api.profile, recipe, overrides, framework=framework, np=np, hosts=hosts, steps=steps,
        torch_profiler=torch_profiler, batch_sizes=whole_numbers("--batch-sizes", batch_sizes), launcher=launcher,
        stall_timeout=stall_timeout, debug=debug, out=out, overwrite=overwrite,
    )  # fmt: skip
    if dry_run:
        return preview(call, json)
    profiled = call()
    show(tables(profiled), 100)
    typer.echo("\n".join([*sentences(profiled), f"written to {profiled.folder / FILE}, {TRACE} and {PICTURE}"]))


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
app.add_typer(text.tokenizer_app, name="tokenizer")


def _version(wanted: bool) -> None:
    if wanted:
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
