"""`hvdkit predict-images`: what is in a picture, by a checkpoint's model, under whichever framework is there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hvdkit import paths
from hvdkit.commands.checked_run import CheckedRun
from hvdkit.commands.fields import Average, CheckpointFolder, Overwrite, WritersFramework
from hvdkit.commands.question import Asked, ask
from hvdkit.commands.request import Argument, Option, Request, say
from hvdkit.data import imagefolder, pictures, pixels, walk
from hvdkit.errors import Faults, HvdkitError
from hvdkit.files import open_regular
from hvdkit.report.tabular import Cell, Table, percent, terminal
from hvdkit.results.predict_images import ImagePredictions

_BATCH = 32  # pictures at once


class PredictImagesRequest(Request):
    """Say what is in pictures: the `top` most probable classes of each, by a run's or a checkpoint's model.

    `images` are JPEG or PNG files, or folders of them. Without `out` nothing is written.
    """

    checkpoint: CheckpointFolder
    images: Annotated[list[Path], Argument("JPEG or PNG files, or folders of them", metavar="IMAGE...")]
    framework: WritersFramework = None
    top: Annotated[int, Option("number of classes to show for each picture"), Field(ge=1)] = 3
    average: Average = True
    out: Annotated[Path | None, Option("a folder for predict-images.json", shown="none")] = None
    overwrite: Overwrite = False


@dataclass(frozen=True)
class Pictures:
    """Pictures and a checkpoint that have passed every check that can be made before a rank starts."""

    plan: CheckedRun
    checkpoint: Path
    files: list[Path]
    top: int
    left_out: list[str]


def check(given: Path, images: Sequence[Path], framework: str | None, top: int) -> Pictures:
    """Check a checkpoint's or a run's folder `given`, and the pictures: files, or folders of which all images are
    taken. Without a `framework` it is the one that has written the checkpoint. Raises RequestError with all faults.

    `left_out` of the result is a line for each folder with files that are not taken."""
    faults = Faults()
    imagefolder.check_packages()
    left_out: list[str] = []
    files = [file for image in images for file in _files(image, faults, left_out)]
    with faults.collected(HvdkitError):
        asked = Asked.of(given)
        how = pictures.preprocessing(asked.recipe.data, int(asked.recipe.model.classes), asked.record.preprocessing)
        plan = asked.plan(framework, batch_size=min(_BATCH, max(1, len(files))))
    faults.report()
    return Pictures(plan, asked.checkpoint, files, min(top, len(how.class_names)), left_out)


def run(request: PredictImagesRequest) -> ImagePredictions:
    """Ask the model. Raises what the launcher raises."""
    pictures = check(paths.settled(request.checkpoint), request.images, request.framework, request.top)
    say(pictures.left_out)
    document = {
        "checkpoint": str(pictures.checkpoint),
        "files": list(map(str, pictures.files)),  # the rank has the same working folder
        "top": pictures.top,
        "average": request.average,
    }
    inputs, out = [request.checkpoint, *request.images], request.out
    with paths.claimed(out, request.overwrite, inputs=inputs) if out else nullcontext() as folder:
        answer = ask(pictures.plan, "--predict-images", document, ImagePredictions, folder)
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
