"""The command line. Most commands are made of their requests (`generated.py`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli import completion, help, setting_up, text
from hvdkit.cli import terminal as console
from hvdkit.cli.generated import Lazy
from hvdkit.cli.options import App
from hvdkit.commands import COMMANDS

app = App(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="One recipe, for a ResNet or a GPT, under PyTorch, TensorFlow, Keras and MXNet over real Horovod.",
)

for name, meaning in COMMANDS.items():
    app.command(name, help=meaning, cls=Lazy)(lambda: None)


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
