"""The command `hvdkit predict-images`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli.options import NoAverage, Overwrite, show


def predict_images(
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT_DIR", help="such as runs/photos")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="JPEG or PNG files, or folders of them")],
    framework: Annotated[
        str | None, typer.Option(help="pytorch, tensorflow, keras or mxnet", show_default="that of the checkpoint")
    ] = None,
    top: Annotated[int, typer.Option(help="number of classes to show for each picture")] = 3,
    no_average: NoAverage = False,
    out: Annotated[Path | None, typer.Option(help="a folder for predict-images.json", show_default="none")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Say what is in pictures: their most probable classes by a trained model."""
    from hvdkit import api
    from hvdkit.commands.predict_images import FILE
    from hvdkit.report.predict_images import predictions_table
    from hvdkit.report.tabular import terminal

    result = api.predict_images(
        checkpoint, images, framework=framework, top=top, average=not no_average, out=out, overwrite=overwrite
    )
    of = ", averaged weights" if result.averaged else ""
    title = f"{result.model}, step {result.step} by {result.trained_by}{of}, under {result.framework}"
    show([terminal(predictions_table(result), title, wrap_from=1)], 100)
    if out:
        typer.echo(f"written to {result.folder / FILE}")
