"""Strategies: how the ranks' gradients become one model. A run chooses one `core.strategy.Strategy`."""

from __future__ import annotations

from hvdkit.core.group import Mesh
from hvdkit.core.seam import Adapter
from hvdkit.core.strategy import GRADIENTS, Strategy
from hvdkit.recipe.schema import Recipe
from hvdkit.strategies.dense import Dense


def choose(adapter: Adapter, mesh: Mesh, recipe: Recipe, name: str = GRADIENTS) -> Strategy:
    """The strategy for the recipe's `sharding`, `compression`, `sync`, `allreduce` and `order`.

    `name` is the prefix of its collectives' names; strategies that are used at the same time have different ones.
    """
    compression = recipe.compression
    batches = recipe.accumulate * mesh.pipeline.size  # at least so many microbatches of an update
    if recipe.sharding != "none" and mesh.data.size > 1:
        half = compression.method == "fp16"
        if recipe.sharding == "parameters":
            from hvdkit.strategies.sharded_parameters import ShardedParameters

            return ShardedParameters(adapter, mesh.data, half, recipe.accumulate, name)
        from hvdkit.strategies.sharded import Sharded

        return Sharded(adapter, mesh.data, recipe.sharding == "gradients", half, accumulate=batches, name=name)
    if recipe.order == "priority" and mesh.data.size > 1:
        from hvdkit.strategies.priority import Priority

        return Priority(adapter, mesh.data, compression.method == "fp16", name)
    if recipe.sync is None and compression.method in ("none", "fp16") and recipe.allreduce == "ring":
        return Dense(adapter, mesh.data, compression.method == "fp16", batches, name)
    # Imported here because most runs need none of these.
    from hvdkit.strategies.compressed import Compressed
    from hvdkit.strategies.local_sgd import LocalSgd
    from hvdkit.strategies.reducer import Reducer
    from hvdkit.strategies.transports import TRANSPORTS

    transport = TRANSPORTS[recipe.allreduce](adapter, mesh, name)
    momentum = float(getattr(recipe.optimizer, "momentum", 0.0))
    gradients = Reducer(transport, compression, recipe.seed, momentum, recipe.optimizer.clip_norm)
    if recipe.sync is None:
        return Compressed(gradients)
    return LocalSgd(gradients, Reducer(transport, compression, recipe.seed), recipe.sync)
