"""What `order: priority` does not go with: whatever needs all gradients, or all weights, at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def rules(recipe: Mapping[str, Any]) -> Iterator[tuple[object, str, str, object]]:
    """As the rules of `schema.py`, of a recipe's values: whether it is broken, the key, what is expected, the value."""
    clip, method, sync = recipe["optimizer"].get("clip_norm"), recipe["compression"]["method"], recipe["sync"]
    for broken, key, expected, why, got in (
        (clip is not None, "optimizer.clip_norm", "null", "a norm of all gradients comes before any update", clip),
        (recipe["precision"] == "fp16", "precision", "fp32, fp64 or bf16", "an overflow skips all updates", "fp16"),
        (method not in ("none", "fp16"), "compression", "none or fp16", "others need whole gradients", method),
        (sync, "sync", "none", "ranks that update alone wait for no gradients", sync and f"every {sync['every']}"),
        (recipe["allreduce"] != "ring", "allreduce", "ring", "Horovod orders pieces", recipe["allreduce"]),
        (recipe["sharding"] != "none", "sharding", "none", "weights are gathered at the end", recipe["sharding"]),
        (recipe["recompute"], "recompute", "false", "a gradient may then come in two parts", "true"),
        (recipe["average_weights"], "average_weights", "null", "it is of the weights of one update", "an average"),
        (recipe["elastic"], "elastic", "null", "the loss of a rank would end updates half-way", "elastic training"),
    ):
        yield broken, key, f"{expected} with order priority, as {why}", got
