"""`hvdkit runtime`, `horovod`, `recipes` and `doctor`: what is there to train with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvdkit.cli import completion
from hvdkit.cli.options import App, Overwrite, show
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.launch.hosts import Host

runtime_app = App(no_args_is_help=True, help="Python environments, each with a framework and a tested Horovod.")
horovod_app = App(no_args_is_help=True, help="Horovod for an environment of your own.")
recipes_app = App(no_args_is_help=True, help="The recipes that come with hvdkit.")


def doctor(
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", help="host:slots,...: examine these", show_default="the allocation's")
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(help="a file of hosts, as MPI's and horovodrun's")] = None,
    interface: Annotated[
        str | None, typer.Option(metavar="NAME|NETWORK", help="such as eth0 or 10.0.0.0/8", show_default="by route")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="the folder of doctor.json", show_default="runs/hosts-doctor-<time>")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Show what is installed and what is broken, with the command that repairs it: here, or on other hosts."""
    from rich.console import Console

    from hvdkit.commands import doctor as doctor_

    console = Console()
    if listed := doctor_.hosts_of(hosts, hostfile):
        raise typer.Exit(_hosts(listed, interface, out, overwrite))
    if given := next((name for name, value in (("--interface", interface), ("--out", out)) if value), None):
        raise RequestError(f"{given}: expected -H or --hostfile with it")

    from hvdkit.runtimes.doctor import examine

    with console.status("examining the machine and the runtimes"):
        report = examine()
    report.render(console)
    raise typer.Exit(report.exit_status)


def _hosts(hosts: list[Host], interface: str | None, out: Path | None, overwrite: bool) -> int:
    """Examine hosts, print what was found; the exit status."""
    from rich.console import Console

    from hvdkit import paths
    from hvdkit.commands import doctor as doctor_
    from hvdkit.report.doctor import lines, table
    from hvdkit.report.tabular import terminal

    doctor_.wanted(interface)
    with (
        paths.claimed(out or paths.default_out("hosts", "doctor"), overwrite) as folder,
        Console(stderr=True).status(f"examining {len(hosts)} hosts"),
    ):
        report = doctor_.examine(hosts, interface, folder)
    hosts_table = terminal(table(report), "hosts, and how the one before each reaches it")
    show([hosts_table, *lines(report), f"written to {report.folder / doctor_.FILE}"])
    return report.exit_status


@runtime_app.command("build")
def runtime_build(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="pytorch, tensorflow, mxnet, deepspeed",
            show_default="the first three",
            autocompletion=completion.runtimes,
        ),
    ] = None,
    gpu: Annotated[bool | None, typer.Option("--gpu/--cpu", show_default="GPU where CUDA is found")] = None,
) -> None:
    """Build the runtimes that are missing or out of date, and test each with two processes."""
    from rich.console import Console

    from hvdkit.commands.runtime import build

    build(names or None, gpu, Console())


@runtime_app.command("add")
def runtime_add(
    name: Annotated[str, typer.Argument(help="as for build", autocompletion=completion.runtimes)],
    python: Annotated[Path, typer.Option(help="the interpreter that has the framework and a Horovod")],
    build: Annotated[bool, typer.Option("--build", help="build a Horovod for it first, and install it there")] = False,
) -> None:
    """Use an interpreter of your own as a runtime."""
    from rich.console import Console

    from hvdkit.commands.runtime import add, describe

    typer.echo(f"{name}: {describe(add(name, python, build, Console(stderr=True)))}")


@runtime_app.command("list")
def runtime_list() -> None:
    """List the runtimes."""
    from hvdkit.commands.runtime import describe
    from hvdkit.runtimes.store import installed

    lines = [f"{runtime.name}: {describe(runtime)}" for runtime in installed()]
    typer.echo("\n".join(lines or ["no runtime is built yet; run `hvdkit runtime build`"]))


@horovod_app.command("wheel")
def horovod_wheel(
    python: Annotated[Path, typer.Option(help="the interpreter of the environment, with its frameworks")],
    gpu: Annotated[bool | None, typer.Option("--gpu/--cpu", show_default="GPU where CUDA is found")] = None,
    out: Annotated[Path, typer.Option(help="the folder of the wheel")] = Path(),
) -> None:
    """Build a Horovod for any environment and test it there; the environment is not changed."""
    from rich.console import Console

    from hvdkit.commands.horovod import build, install_command

    wheel = build(python, gpu, out, Console(stderr=True))
    typer.echo(f"{wheel}\ninstall it: {install_command(python, wheel)}")


@recipes_app.command("list")
def recipes_list() -> None:
    """List the recipes that come with hvdkit, each with a description."""
    from hvdkit.recipe import registry

    for entry in registry.entries():
        typer.echo(f"{entry.name}: {entry.description}")


@recipes_app.command("copy")
def recipes_copy(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FRAMEWORK", help="a recipe's YAML or a framework's script", autocompletion=completion.copies
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="[DEST]", help="the folder to copy into")] = Path(),
) -> None:
    """Copy a recipe, or the script that runs recipes under a framework, for you to change."""
    from hvdkit.recipe import registry

    typer.echo(f"copied to {registry.copy(name, destination)}")
