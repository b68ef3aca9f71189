"""What the keys of a recipe that say how ranks communicate need of each other, and of the optimizer."""

from __future__ import annotations

from typing import Any

from hvdkit.recipe.communication import SUMMED
from hvdkit.recipe.data import Rules


def rules(recipe: Any) -> Rules:
    """What `hvdkit/recipe/schema.py` checks beside what models and data need."""
    compression, method, algorithm = recipe.compression, recipe.compression.method, recipe.allreduce
    optimizer, sync, every = recipe.optimizer, recipe.sync is not None, recipe.sync and recipe.sync.every
    with_shares = f"with sharding {recipe.sharding}"
    momentum, nesterov = getattr(optimizer, "momentum", 0.0), getattr(optimizer, "nesterov", False)
    warmup, corrects = getattr(compression, "warmup_epochs", 0), getattr(compression, "momentum_correction", False)
    key, kind = "compression.momentum_correction", "with nesterov" if nesterov else f"with momentum {momentum}"
    yield warmup > recipe.epochs, "compression.warmup_epochs", f"at most the recipe's {recipe.epochs} epochs", warmup
    if corrects:
        plain = optimizer.name == "sgd" and momentum and not nesterov
        yield not plain, key, "optimizer sgd with plain momentum", f"{optimizer.name} {kind}"
        yield sync, key, "no sync, as differences of weights have no momentum", f"sync.every {every}"
    if sync:
        together = "precision fp32, fp64 or bf16, as ranks of fp16 skip a step together or not at all"
        yield recipe.precision == "fp16", "sync", together, "fp16"
    yield from _of_found_batches(recipe)
    if algorithm != "ring":
        sums = f"ring, or compression {', '.join(SUMMED)}, as {method} cannot be added up"
        yield method not in SUMMED, "allreduce", sums, algorithm
        yield recipe.elastic, "allreduce", "ring where elastic is given", algorithm
    if recipe.order == "priority":
        yield from _of_priority(recipe)
    if recipe.sharding != "none":
        own_share = f"none or fp16 {with_shares}, which sends each rank only its share of the gradients"
        yield method not in ("none", "fp16"), "compression", own_share, method
        yield (
            sync,
            "sync",
            f"none {with_shares}, as ranks that update alone need all of its state",
            f"every {every}",
        )
        yield algorithm != "ring", "allreduce", f"ring {with_shares}, whose gradients are not allreduced", algorithm


def _of_priority(recipe: Any) -> Rules:
    """What `order: priority` does not go with: whatever needs all gradients, or all weights, at once."""
    clip, method, sync = recipe.optimizer.clip_norm, recipe.compression.method, recipe.sync
    for broken, key, expected, why, got in (
        (clip is not None, "optimizer.clip_norm", "null", "a norm of all gradients comes before any update", clip),
        (recipe.precision == "fp16", "precision", "fp32, fp64 or bf16", "an overflow skips all updates", "fp16"),
        (method not in ("none", "fp16"), "compression", "none or fp16", "others need whole gradients", method),
        (sync, "sync", "none", "ranks that update alone wait for no gradients", sync and f"every {sync.every}"),
        (recipe.allreduce != "ring", "allreduce", "ring", "Horovod orders pieces", recipe.allreduce),
        (recipe.sharding != "none", "sharding", "none", "weights are gathered at the end", recipe.sharding),
        (recipe.recompute, "recompute", "false", "a gradient may then come in two parts", "true"),
        (recipe.average_weights, "average_weights", "null", "it is of the weights of one update", "an average"),
        (recipe.elastic, "elastic", "null", "the loss of a rank would end updates half-way", "elastic training"),
    ):
        yield broken, key, f"{expected} with order priority, as {why}", got


def _of_found_batches(recipe: Any) -> Rules:
    found, needs = recipe.finds_batch_size, "batch_size auto with it"
    yield not found and recipe.max_batch_size is not None, "max_batch_size", needs, f"batch_size {recipe.batch_size}"
    yield not found and recipe.accumulate_rest, "accumulate_rest", needs, f"batch_size {recipe.batch_size}"
    for broken, key, why in (
        (recipe.parallel.divides, "parallel", "as one process alone tries what fits"),
        (recipe.sharding != "none", "sharding", "as one process alone tries what fits"),
        (recipe.elastic, "elastic", "as its ranks change"),
        (recipe.tune == "measure", "tune: measure", "as its short runs come first"),
        (recipe.data.name == "native", "data.name: native", "as its pipeline makes the batches"),
    ):
        yield found and broken, "batch_size", f"a number with {key}, {why}", "auto"
