"""Every capability of an adapter, and its meaning. `adapters/capabilities.py` has those of each."""

from __future__ import annotations

# An adapter lists those that it has; the contract tests check that what it lists works and that what it does not list
# fails.
CAPABILITIES = {
    "gpu": "can run on a GPU, given a build for it",
    "fp64": "trains with `precision: fp64`",
    "bf16": "trains with `precision: bf16` on a CPU",
    "fp16": "trains with `precision: fp16` on a CPU",
    "gpu-bf16": "trains with `precision: bf16` on a GPU",
    "gpu-fp16": "trains with `precision: fp16` on a GPU",
    "exact-sums": "its float32 batch norm adds up in more than float32, or in a tree, not one value after the other",
    "layer-times": "records when each layer's forward pass has ended, beside when each gradient is ready",
    "own-profile": "writes its framework's own profile beside hvdkit's",
    "shard-gradients": "trains with `sharding: gradients`",
    "shard-parameters": "trains with `sharding: parameters`",
    "recompute": "computes activations again in backward where the recipe says `recompute: true`",
    "float16": "reduces float16 tensors",
    "float32": "reduces float32 tensors",
    "float64": "reduces float64 tensors",
    "bfloat16": "reduces bfloat16 tensors",
    "uint8": "reduces uint8 tensors",
    "int8": "reduces int8 tensors",
    "int32": "reduces int32 tensors",
    "int64": "reduces int64 tensors",
    "scalars": "takes tensors without dimensions",
    "empty": "takes tensors without elements",
}
