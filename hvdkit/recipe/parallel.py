"""What the keys of `parallel` need of the rest of a recipe, and of the number of ranks.

docs/parallelism.md says what each axis is for, and what goes together with it.
"""

from __future__ import annotations

from typing import Any

from hvdkit.errors import RequestError
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.data import Rules

_PER_STAGE = 4  # microbatches for each stage, from which the bubble is small (Huang et al. 2019, section 4)


def check_ranks(parallel: Parallel, np: int) -> None:
    """Raise RequestError unless the axes are those of `np` ranks."""
    axes = f"{parallel.pipeline} (pipeline) × {parallel.tensor} (tensor)"
    if parallel.data != "auto" and (product := parallel.data * parallel.model) != np:
        raise RequestError(f"parallel: expected -np {product}, which is {parallel.data} (data) × {axes}, got -np {np}")
    if np % parallel.model:
        raise RequestError(f"parallel: expected a multiple of {parallel.model} ranks, which is {axes}, got -np {np}")


def check_whole(parallel: Parallel, command: str) -> None:
    """Raise RequestError if a model is divided, for a command that does not know such models yet."""
    if parallel.divides:
        raise RequestError(
            f"parallel: {command} does not know models that are divided over ranks yet; expected pipeline 1 and "
            f"tensor 1, got {parallel.pipeline} and {parallel.tensor}"
        )


def microbatches_of(parallel: Parallel, batch_size: int) -> int:
    """Into how many equal parts a batch is divided; 0 if it cannot be."""
    if parallel.microbatches != "auto":
        return 0 if batch_size % parallel.microbatches else parallel.microbatches
    most = min(_PER_STAGE * parallel.pipeline, batch_size)
    step = parallel.pipeline if parallel.chunks > 1 else 1  # of an interleaved schedule's turns
    allowed = range(most - most % step, parallel.pipeline - 1, -step)
    return next((parts for parts in allowed if batch_size % parts == 0), 0)


def rules(recipe: Any) -> Rules:
    """As those of `together.py`. Most are of what is not built yet."""
    parallel, batch_size, name = recipe.parallel, recipe.batch_size, recipe.model.name
    stages, method, sync, loss = parallel.pipeline, recipe.compression.method, recipe.sync, recipe.loss
    if stages > 1 and not microbatches_of(parallel, batch_size):
        fits = f"a multiple of parallel.microbatches, {parallel.microbatches}"
        if parallel.microbatches == "auto":
            divisor = f"a divisor from {stages} to {_PER_STAGE * stages}"
            divisor += f" that is a multiple of {stages}" if parallel.chunks > 1 else ""
            fits = f"a number of samples with {divisor}, of microbatches"
        yield True, "batch_size", fits, batch_size
    few = name.startswith("resnet") and stages > 1 and microbatches_of(parallel, batch_size) == batch_size
    yield few, "batch_size", "2 samples or more a microbatch, which batch norm sees", batch_size
    divided = "with a model that is divided over ranks (parallel.pipeline, parallel.tensor)"
    has_norms = not name.startswith("gpt")  # averages of statistics are whole
    chunks, parts = parallel.chunks > 1, parallel.tensor > 1 and not has_norms  # of the outputs, too
    whole = ("none",) if chunks or has_norms else ("none", "optimizer")
    for broken, key, expected, got in (
        (parallel.tensor > 1 and name == "own", "model.name", "a model of hvdkit's", name),
        (method != "none", "compression", "none", method),
        (sync, "sync", "none", sync and f"every {sync.every}"),
        (recipe.allreduce != "ring", "allreduce", "ring", recipe.allreduce),
        (recipe.order != "none", "order", "none", recipe.order),
        (recipe.sharding not in whole, "sharding", " or ".join(whole), recipe.sharding),
        ((chunks or has_norms) and recipe.average_weights, "average_weights", "null", "an average"),
        (recipe.elastic, "elastic", "null", "elastic training"),
        (parts and loss.ignored_label is not None, "loss.ignored_label", "none", loss.ignored_label),
        (recipe.tune == "measure", "tune", "rule or none", "measure"),
    ):
        yield broken, key, f"{expected} {divided}, as no more is built yet", got
