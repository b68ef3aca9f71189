"""The answer of `hvdkit predict-images` as a table."""

from __future__ import annotations

from hvdkit.report.tabular import Cell, Table, percent
from hvdkit.results.predict_images import ImagePredictions


def predictions_table(predictions: ImagePredictions) -> Table:
    """A row for each of a picture's classes; the picture is named in the first of them."""
    rows = [
        [Cell("" if rank else picture.file), Cell(guess.name), percent(guess.probability)]
        for picture in predictions.pictures
        for rank, guess in enumerate(picture.classes)
    ]
    return Table("predictions", ["picture", "class", "probability"], rows)
