"""Tasks: what a recipe trains. Core, data and the ranks know models and metrics only as `task.Task`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `hvdkit predict` reads no recipe
    from hvdkit.recipe.schema import Recipe
    from hvdkit.tasks.task import Task


def choose(recipe: Recipe) -> Task:
    """The task of the recipe's model: `TASK` of the module that the model's schema names."""
    task: Task = import_module(f"hvdkit.tasks.{recipe.model.TASK}").TASK(recipe)
    return task
