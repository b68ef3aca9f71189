"""Tasks: what a recipe trains. Core, data and the ranks know networks and metrics only as `task.Task`."""

from __future__ import annotations

from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.task import Task


def choose(recipe: Recipe) -> Task:
    """The task of the recipe's network and data."""
    from hvdkit.tasks.image_classification import ImageClassification

    return ImageClassification(recipe)
