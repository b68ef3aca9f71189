"""The schema of `predict-images.json`."""

from __future__ import annotations

from typing import Any

from hvdkit.results.json_files import Figures, Record, Result


class Guess(Figures):
    """A class, by its name and its number, and the probability that the model gives it, a fraction of 1."""

    name: str
    label: int
    probability: float


class Picture(Record):
    """A picture's file, and its most probable classes, the first one first."""

    file: str
    classes: list[Guess]


class ImagePredictions(Record, Result, file="predict-images.json", of="what `hvdkit predict-images` has written"):
    """`predict-images.json`: what a checkpoint `trained_by` one framework says, under `framework`, about pictures.

    `averaged` says whether its weights are averaged ones.
    """

    framework: str
    framework_version: str
    hvdkit_version: str
    recipe: str
    model: str
    checkpoint: str
    trained_by: str
    step: int
    averaged: bool = False
    pictures: list[Picture]

    def records(self) -> list[dict[str, Any]]:
        """A row for each class that is shown of each picture, the most probable one first."""
        return [{"file": picture.file, **guess.model_dump()} for picture in self.pictures for guess in picture.classes]
