"""`hvdkit predict-images`: what is in a picture, by a checkpoint's model, under whichever framework is there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands.plan import Plan
from hvdkit.commands.question import Asked, ask
from hvdkit.data import imagefolder, pictures, pixels, walk
from hvdkit.errors import Faults, HvdkitError
from hvdkit.files import open_regular
from hvdkit.results.predict_images import ImagePredictions, read_predictions

_BATCH = 32  # pictures at once
FILE = "predict-images.json"


@dataclass(frozen=True)
class Request:
    """Pictures and a checkpoint that have passed every check that can be made before a rank starts."""

    plan: Plan
    checkpoint: Path
    files: list[Path]
    top: int
    left_out: list[str]


def check(given: Path, images: Sequence[Path], framework: str | None, top: int) -> Request:
    """Check a checkpoint's or a run's folder `given`, and the pictures: files, or folders of which all images are
    taken. Without a `framework` it is the one that has written the checkpoint. Raises RequestError with all faults.

    `left_out` of the result is a line for each folder with files that are not taken."""
    faults = Faults([f"--top {top}: expected 1 or more"] if top < 1 else [])
    imagefolder.check_pillow()
    left_out: list[str] = []
    files = [file for image in images for file in _files(image, faults, left_out)]
    with faults.collected(HvdkitError):
        asked = Asked.of(given)
        how = pictures.preprocessing(asked.recipe.data, int(asked.recipe.model.classes), asked.record.preprocessing)
        plan = asked.plan(framework, batch_size=min(_BATCH, max(1, len(files))))
    faults.report()
    return Request(plan, asked.checkpoint, files, min(top, len(how.class_names)), left_out)


def run(request: Request, folder: Path | None, average: bool = True) -> ImagePredictions:
    """The answer, which is also written into `folder` (absolute, there and empty) if there is one.

    With `average` it is that of the averaged weights, where the checkpoint has any. Raises what the launcher raises.
    """
    document = {
        "checkpoint": str(request.checkpoint),
        "files": list(map(str, request.files)),  # the rank has the same working folder
        "top": request.top,
        "average": average,
    }
    return ask(request.plan, "--predict-images", document, FILE, read_predictions, folder)


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
