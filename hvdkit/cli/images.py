"""The command `hvdkit predict-images`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli.options import Overwrite, show


def predict_images(
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT_DIR", help="such as runs/photos")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="JPEG or PNG files, or folders of them")],
    framework: Annotated[
        str | None, typer.Option(help="pytorch, tensorflow, keras or mxnet", show_default="that of the checkpoint")
    ] = None,
    top: Annotated[int, typer.Option(help="number of classes to show for each picture")] = 3,
    out: Annotated[Path | None, typer.Option(help="a folder for predict-images.json", show_default="none")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Say what is in pictures: their most probable classes by a trained model."""
    from contextlib import nullcontext

    from hvdkit import paths
    from hvdkit.commands import predict_images as predict_images_
    from hvdkit.report.predict_images import predictions_table
    from hvdkit.report.tabular import terminal

    request = predict_images_.check(checkpoint, images, framework, top)
    with paths.claimed(out, overwrite, inputs=[checkpoint, *images]) if out else nullcontext() as folder:
        result = predict_images_.run(request, folder)
        title = f"{result.model}, step {result.step} by {result.trained_by}, under {result.framework}"
        show([terminal(predictions_table(result), title, wrap_from=1)], 100)
        if folder:
            typer.echo(f"written to {folder / predict_images_.FILE}")
