"""What a recipe leaves to its folder of images: the number of classes, and the size of what the model sees."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.data import imagefolder, pixels
from hvdkit.data.imagefolder import Folder, Listing
from hvdkit.errors import RequestError
from hvdkit.recipe.data import evaluation_side
from hvdkit.recipe.schema import ImageFolder, Model, Recipe
from hvdkit.tasks import resnet

_LOOKED_AT = 200  # images whose size is read, spread over all of them
_OWN_SIDE = 224  # for models of the user's own, about which nothing is known
_SHOWN = 8  # class names in a line


@dataclass(frozen=True)
class Decision:
    """A recipe in which nothing is left to its folder; `lines` say what, `warnings` what looks wrong."""

    recipe: Recipe
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def decide(recipe: Recipe, earlier: Recipe | None = None) -> Decision:
    """Look into the recipe's folder of images. What it does not say is taken from `earlier`, the recipe of the run that
    is resumed, or else from the folder.

    Raises RequestError as `imagefolder.look` does, and for fewer than two class folders or more than the model has.
    """
    data = recipe.data
    if not isinstance(data, ImageFolder):
        return Decision(recipe)
    root = Path(data.path)
    if not recipe.undecided and not root.is_dir():
        return Decision(recipe)  # the ranks' hosts may have it
    if earlier is not None and isinstance(earlier.data, ImageFolder):
        recipe, data = _filled(recipe, earlier.model.classes, earlier.data.size, earlier.data.resize)
    imagefolder.check_packages()
    folder = imagefolder.look(data, recipe.seed)
    count, classes = len(folder.classes), recipe.model.classes
    if count < 2:
        raise RequestError(f"data.path: {root}: expected two class folders or more, found only {folder.classes[0]!r}")
    if classes != "auto" and classes < count:
        raise RequestError(
            f"model.classes: {root} has {count} class folders ({_named(folder)}), the model {classes} classes; set "
            f"model.classes={count} or auto"
        )
    side = _median_side(folder.train)
    usual = _architecture(recipe).usual_side if isinstance(recipe.model, Model) else _OWN_SIDE
    # CIFAR's models are made for enlarged thumbnails too; the others get no more pixels than the images have
    sensible = usual if usual < 64 or side is None else min(usual, max(32, side // 32 * 32))
    recipe, data = _filled(recipe, count, sensible, evaluation_side(sensible))
    lines = [
        f"{root}: {count} classes ({_named(folder)}); {folder.division}",
        f"model.classes: {recipe.model.classes}; data.size: {data.size}, where {recipe.model.name} is made for {usual} "
        f"pixels, and the images have {side or 'an unknown number'} on their shorter side (median)",
    ]
    return Decision(recipe, lines, _doubts(recipe, data, folder))


def _filled(recipe: Recipe, classes: int | str, size: int | str, resize: int | str) -> tuple[Recipe, ImageFolder]:
    """The recipe with these values in the place of `auto`."""
    data, model = recipe.data, recipe.model
    assert isinstance(data, ImageFolder)
    if data.size == "auto":
        data = data.model_copy(update={"size": size, "resize": resize})
    if model.classes == "auto":
        model = model.model_copy(update={"classes": classes})
    return recipe.model_copy(update={"data": data, "model": model}), data


def _architecture(recipe: Recipe) -> resnet.ResNet:
    return resnet.architecture(recipe.model.name, 2 if recipe.model.classes == "auto" else recipe.model.classes)


def _named(folder: Folder) -> str:
    names = [name if name.isprintable() else repr(name) for name in folder.classes[:_SHOWN]]
    return ", ".join(names) + (", …" if len(folder.classes) > _SHOWN else "")


def _alike(folder: Folder) -> list[str]:
    """A line for each two classes that look like one: their names differ only in case or in spaces, or the folder of
    one is a link to that of the other."""
    lines: list[str] = []
    names: dict[str, str] = {}
    former_names: dict[str, str] = {}
    root = folder.train.folder
    for name, on_disk in zip(folder.classes, folder.train.folders, strict=True):
        if (former := names.setdefault(" ".join(name.split()).casefold(), name)) != name:
            lines.append(f"{root}: {former!r} and {name!r} are two classes; if they are one, move the images together")
        if (former := former_names.setdefault(os.path.realpath(Path(root, on_disk)), name)) != name:
            lines.append(f"{root}: {former!r} and {name!r} are two classes and the same folder; remove the link")
    return lines[:_SHOWN]


def _median_side(listing: Listing) -> int | None:
    """The median of the images' shorter sides in pixels, by the files' headers; None if none can be read."""
    sides = []
    step = max(1, len(listing) // _LOOKED_AT)
    for index in range(0, len(listing), step):
        try:
            sides.append(min(pixels.size_of(listing.path(index))))
        except pixels.CorruptImage:  # data.corrupt decides about it
            continue
    return int(statistics.median(sides)) if sides else None


def _doubts(recipe: Recipe, data: ImageFolder, folder: Folder) -> list[str]:
    """What fits together, but hardly as it was meant; each with the key to set."""
    doubts, size, count = _alike(folder), int(data.size), len(folder.classes)
    if recipe.model.weights is None and int(recipe.model.classes) > count:
        doubts.append(
            f"model.classes: the model has {recipe.model.classes} classes, the folder {count}; set "
            f"model.classes={count} or auto"
        )
    if int(data.resize) > 2 * size:
        doubts.append(
            f"data.resize: of images of {data.resize} pixels, evaluation sees the {size} × {size} in the centre; set "
            "data.resize=auto"
        )
    if not isinstance(recipe.model, Model):
        return doubts
    table = _architecture(recipe)
    usual = table.usual_side
    if size > 2 * usual:
        doubts.append(
            f"data.size: {table.name} is made for {usual} pixels and sees little of an image of {size}; set "
            f"data.size={usual}, or model.name=resnet18 for large images"
        )
    elif 4 * size < usual:
        doubts.append(
            f"data.size: {table.name} is made for {usual} pixels and reduces an image of {size} to "
            f"{' × '.join(map(str, table.last_map(size, size)))}; set data.size={usual}, or model.name=resnet20 for "
            "small images"
        )
    return doubts
