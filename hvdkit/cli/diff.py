"""The command `hvdkit diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli.options import Overwrite

Run = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of an `hvdkit train`")]


def diff(
    first: Run,
    second: Run,
    out: Annotated[Path | None, typer.Option(help="a folder for diff.json", show_default="none")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare two runs: settings, versions, the first step with another loss, weights; status 1 if they differ."""
    from hvdkit import api
    from hvdkit.report.diff import lines
    from hvdkit.results.diff import FILE

    difference = api.diff(first, second, out=out, overwrite=overwrite)
    typer.echo("\n".join([*lines(difference), *([f"written to {difference.folder / FILE}"] if out else [])]))
    raise typer.Exit(0 if difference.same else 1)
