"""The command line: every command is made of its request (`generated.py`)."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hvdkit.cli import terminal
from hvdkit.cli.generated import HELP, lazy
from hvdkit.commands import COMMANDS, GROUPS, PANELS
from hvdkit.errors import RequestError

app = typer.Typer(
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    help="One recipe, for a ResNet or a GPT, under PyTorch, TensorFlow, Keras and MXNet over real Horovod.",
    epilog="`hvdkit COMMAND -h` explains a command, with examples. "
    "Begin with: hvdkit train resnet20-digits --framework pytorch -np 2",
)
_panels = {word: panel for panel, words in PANELS.items() for word in words.split()}
_groups = {"": app}
for _group, _meaning in GROUPS.items():
    _groups[_group] = typer.Typer(no_args_is_help=True, context_settings=HELP)
    app.add_typer(_groups[_group], name=_group, help=_meaning, rich_help_panel=_panels[_group])
for _command, _meaning in COMMANDS.items():
    _group, _, _name = _command.rpartition(" ")
    if _group in COMMANDS:  # `bench links` beside `bench`, which hands it on
        _group, _name = "", _command
    _panel = None if _group else _panels[_name.split()[0]]
    _groups[_group].command(_name, help=_meaning, cls=lazy(_command), rich_help_panel=_panel)(lambda: None)


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
    words = sys.argv[1:]
    try:
        terminal.prepare()
        terminal.end_on_signals(own_process)
        if "" in words:
            before = words[words.index("") - 1] if words.index("") else "hvdkit"
            raise RequestError(f"an empty word after {before}: expected a value; is a variable of the shell not set?")
        status = app(standalone_mode=False)
    except BaseException as end:
        if own_process:
            terminal.forget_signals()
        status = terminal.ended(end, words)
    else:
        status = terminal.ended(SystemExit(status), words)
    sys.exit(status)
