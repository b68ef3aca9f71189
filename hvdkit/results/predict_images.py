"""The schema of `predict-images.json`."""

from __future__ import annotations

from typing import Any

from hvdkit.results.json_files import Figures, OfCheckpoint, Record, Result


class Guess(Figures):
    """A class, by its name and its number, and the probability that the model gives it, a fraction of 1."""

    name: str
    label: int
    probability: float


class Picture(Record):
    """A picture's file, and its most probable classes, the first one first."""

    file: str
    classes: list[Guess]


class ImagePredictions(OfCheckpoint, Result, file="predict-images.json", of="what `hvdkit predict-images` has written"):
    """`predict-images.json`: what a checkpoint's model says about pictures."""

    recipe: str
    checkpoint: str
    pictures: list[Picture]

    def records(self) -> list[dict[str, Any]]:
        """A row for each class that is shown of each picture, the most probable one first."""
        return [{"file": picture.file, **guess.model_dump()} for picture in self.pictures for guess in picture.classes]
