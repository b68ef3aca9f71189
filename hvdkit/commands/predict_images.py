"""`hvdkit predict-images`: what is in a picture, by a checkpoint's model, under whichever framework is there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hvdkit import paths
from hvdkit.commands.checked_run import CheckedRun
from hvdkit.commands.fields import Average, CheckpointFolder, MayWrite, WritersFramework
from hvdkit.commands.question import Asked, ask
from hvdkit.commands.request import Argument, Option, say
from hvdkit.data import imagefolder, pictures, pixels, walk
from hvdkit.errors import Faults, HvdkitError
from hvdkit.files import open_regular
from hvdkit.report.tabular import Cell, Table, percent, terminal
from hvdkit.results.predict_images import ImagePredictions

_BATCH = 32  # pictures at once


class PredictImagesRequest(MayWrite):
    """Say what is in pictures: the `top` most probable classes of each, by a run's or a checkpoint's model.

    `images` are JPEG or PNG files, or folders of them. Without `out` nothing is written.
    """

    checkpoint: CheckpointFolder
    images: Annotated[list[Path], Argument("JPEG or PNG files, or folders of them", metavar="IMAGE...")]
    framework: WritersFramework = None
    top: Annotated[int, Option("number of classes to show for each picture"), Field(ge=1)] = 3
    average: Average = True


def checked(given: Path, images: Sequence[Path], framework: str | None, top: int) -> tuple[CheckedRun, dict[str, Any]]:
    """The run of a checkpoint's or a run's folder `given`, and what its rank is asked: the pictures are files, or
    folders of which all images are taken; a line is printed for each folder with other files.

    Without a `framework` it is the one that has written the checkpoint. Raises RequestError with all faults.
    """
    faults = Faults()
    imagefolder.check_packages()
    left_out: list[str] = []
    files = [file for image in images for file in _files(image, faults, left_out)]
    with faults.collected(HvdkitError):
        asked = Asked.of(given)
        how = pictures.preprocessing(asked.recipe.data, int(asked.recipe.model.classes), asked.record.preprocessing)
        plan = asked.plan(framework, batch_size=min(_BATCH, max(1, len(files))))
    faults.report()
    say(left_out)
    # The rank has the same working folder.
    query = {"checkpoint": str(asked.checkpoint), "files": list(map(str, files)), "top": min(top, len(how.class_names))}
    return plan, query


def run(request: PredictImagesRequest) -> ImagePredictions:
    """Ask the model. Raises what the launcher raises."""
    plan, query = checked(paths.settled(request.checkpoint), request.images, request.framework, request.top)
    with request.claimed([request.checkpoint, *request.images]) as folder:
        answer = ask(plan, "--predict-images", query | {"average": request.average}, ImagePredictions, folder)
        return answer.at(folder) if folder else answer


def lines(request: PredictImagesRequest, result: ImagePredictions) -> Iterator[Any]:
    """A row for each picture."""
    of = ", averaged weights" if result.averaged else ""
    title = f"{result.model}, step {result.step} by {result.trained_by}{of}, under {result.framework}"
    yield terminal(_table(result), title, wrap_from=1)
    if request.out:
        yield f"written to {result.folder / result.FILE}"


def _files(image: Path, faults: list[str], left_out: list[str]) -> list[Path]:
    """The picture, or all images in a folder, sorted; a fault for each that is none by its header."""
    expected = "expected a JPEG or PNG image, or a folder of them"
    try:
        if image.is_dir():
            others: Counter[str] = Counter()
            files = [image / name for name in walk.pictures(image, pixels.SUFFIXES, others)]
            if not files:
                has = walk.content(image)
                faults.append(f"{image}: no images in it{has}; expected files that end in {', '.join(pixels.SUFFIXES)}")
            elif line := walk.line(image, others):
                left_out.append(line)
        else:
            open_regular(image).close()  # a pipe would be waited for
            files = [image]
    except OSError as error:
        faults.append(f"{image}: cannot be read ({error.strerror}); {expected}")
        return []
    for file in files:
        try:
            pixels.size_of(os.fspath(file))
        except pixels.CorruptImage as error:
            faults.append(f"{file}: {error}; {expected}")
    return files


def _table(predictions: ImagePredictions) -> Table:
    """A row for each of a picture's classes; the picture is named in the first of them."""
    rows = [
        [Cell("" if rank else picture.file), Cell(guess.name), percent(guess.probability)]
        for picture in predictions.pictures
        for rank, guess in enumerate(picture.classes)
    ]
    return Table("predictions", ["picture", "class", "probability"], rows)
