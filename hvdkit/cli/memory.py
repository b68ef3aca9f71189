"""The command `hvdkit memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli import completion
from hvdkit.cli.options import Framework, Overrides, Overwrite, RecipeFile, show
from hvdkit.defaults import FRAMEWORK


def memory(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("-n", "-np", "--np", help="number of ranks; may be repeated", show_default="1"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="whether it fits: a GPU such as h100, or its memory such as 24GiB",
            show_default="none",
            autocompletion=completion.devices,
        ),
    ] = None,
    framework: Framework = FRAMEWORK,
    as_json: Annotated[bool, typer.Option("--json", help="print memory.json instead of the table")] = False,
    out: Annotated[Path | None, typer.Option(help="a folder for memory.json", show_default="none")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Count the memory that a recipe needs, by part and stage of sharding, without running anything."""
    from hvdkit import api
    from hvdkit.report import memory as report
    from hvdkit.report.tabular import terminal
    from hvdkit.results.memory import FILE

    needs = api.memory(recipe, overrides, ranks=ranks, device=device, framework=framework, out=out, overwrite=overwrite)
    if as_json:
        typer.echo(needs.model_dump_json(indent=2))
        return
    typer.echo(report.title(needs))
    show([terminal(table, "") for table in report.tables(needs)], 120)
    typer.echo("\n".join([*report.notes(needs), *([f"written to {needs.folder / FILE}"] if out else [])]))
