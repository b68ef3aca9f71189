"""What each adapter supports, by the keys of `MEANINGS`, and its choices for speed.

This is a separate module, so that no framework has to be loaded to read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hvdkit.core.precision import PRECISIONS
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.core.group import Topology
    from hvdkit.core.seam import Adapter
    from hvdkit.recipe.schema import Recipe

# An adapter lists those that it has; the contract tests check that what it lists works and that what it does not list
# fails.
MEANINGS = {
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
    "order": "trains with `order: priority` on a CPU",
    "pipeline": "trains stages of a model with `parallel.pipeline` on a CPU",
    "pipeline-resnet": "trains stages of a ResNet",
    "tensor-resnet": "trains parts of a ResNet's blocks",
    "pipeline-own": "trains stages of a model of the user's own, whose `blocks` say what they are",
    "interleaved": "trains stages of several chunks, with `parallel.schedule: interleaved`",
    "tensor": "trains parts of layers with `parallel.tensor` on a CPU",
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

_REDUCED = frozenset({"float16", "float32", "float64", "int32", "int64"})
_PRECISIONS = frozenset({"fp64", "bf16", "fp16", "gpu-bf16", "gpu-fp16", "bfloat16"})
_MODERN = _PRECISIONS | {"gpu", "exact-sums", "recompute", "shard-gradients"}
_ON_TENSORFLOW = _MODERN | _REDUCED | {"int8", "uint8", "scalars", "empty", "layer-times"}
_ON_TENSORFLOW |= {"pipeline", "pipeline-resnet", "interleaved", "tensor", "tensor-resnet"}

CAPABILITIES: dict[str, frozenset[str]] = {
    "pytorch": _MODERN
    | _REDUCED
    | {"scalars", "empty", "layer-times", "own-profile", "shard-parameters", "order", "pipeline", "tensor"}
    | {"pipeline-resnet", "pipeline-own", "interleaved", "tensor-resnet"},
    **dict.fromkeys(("tensorflow", "keras"), _ON_TENSORFLOW),
    "mxnet": _REDUCED | {"gpu", "fp64", "int8", "uint8", "order", "pipeline", "pipeline-resnet", "tensor"},
}

# Frameworks that keep the weights of attention until backward; a fused kernel computes them again.
KEEPS_ATTENTION_WEIGHTS = frozenset({"tensorflow", "keras", "mxnet"})

# Frameworks whose gradients are parts of one vector on a CPU, which is sent as it is.
JOINS_GRADIENTS = frozenset({"pytorch"})

# Frameworks whose backward adds the gradients of a stage's microbatches to their sums (`core/passes.py`).
ADDS_IN_BACKWARD = frozenset({"pytorch"})

# Frameworks that join a group of tensors on a CPU before they reduce it, of which no copy comes back. Ranks that share
# memory need no copy at all: grouped, ResNet-50 under MXNet needs 0.82 of the memory (990, 815 MiB; medians of 6 runs).
REDUCES_AS_ONE = frozenset({"pytorch"})

# With sharding: bytes of a block from which it is returned to the kernel as soon as a step frees it; the second for
# a model with at least so many parameters. New pages take time at the next use (benchmarks/notes.md).
OWN_PAGES_FROM = {"pytorch": (32 * 2**20, 4 * 2**20)}
LARGE_MODEL = 2**26

# MiB of a process without its model. On a CPU: measured, the peak of a rank that trains a GPT of 8,432 parameters
# (Linux, Python 3.11, the pinned versions). On a GPU: PyTorch's kernels and context, as Hugging Face measured them.
RESIDENT_SOURCE = {
    "cpu": "measured on Linux with the pinned versions",
    "gpu": "1,343 MiB of PyTorch's kernels and context, huggingface.co/docs/transformers/v4.44.2/model_memory_anatomy",
}
RESIDENT_MIB = {
    "pytorch": {"cpu": 273, "gpu": 1343},
    "tensorflow": {"cpu": 570, "gpu": 1343},
    "keras": {"cpu": 586, "gpu": 1343},
    "mxnet": {"cpu": 187, "gpu": 1343},
}

# MiB besides on a CPU: kernels of convolutions, as a rank has them that trains a ResNet-8 with batches of one image,
# and what the first stage of a pipeline has more than the last, of a GPT of 33,000 parameters.
MORE_RESIDENT_MIB = {"pytorch": {"convolutions": 29, "first stage": 31}}

# On a CPU: what backward takes besides, as a part of the activations that are kept, in a pipeline of one microbatch's:
# gradients of activations, and pieces that were freed and fit nothing, as it seems because glibc wants more than a
# block's own size where PyTorch asks for an aligned one. Fitted to peaks (benchmarks/peaks.md), of PyTorch alone.
UNUSED_OF_ACTIVATIONS = {"pytorch": {"data": 0.42, "tensor": 1.35, "pipeline": 1.4}}

_THREADS = ("a number of threads, 1 or more", r"|0*[1-9][0-9]{0,3}")
_POOLS = ("CPU_WORKER", "CPU_PRIORITY", "CPU_NNPACK", "GPU_WORKER", "GPU_COPY", "MP_WORKER")
# Environment variables with which importing the framework ends the process, unless they have these values: in
# words, and as a pattern.
ENVIRONMENT: dict[str, dict[str, tuple[str, str]]] = {
    "mxnet": {f"MXNET_{pool}_NTHREADS": _THREADS for pool in _POOLS}
    | {
        "MXNET_ENGINE_TYPE": (
            "NaiveEngine, ThreadedEngine or ThreadedEnginePerDevice",
            "NaiveEngine|ThreadedEngine|ThreadedEnginePerDevice",
        )
    },
}

_Chosen = dict[str, dict[str, tuple[str, str]]]
_GROUP = ("one group after backward", "sending during backward would use the cores that compute; one negotiation")
_GRAPH = ("traced once", "no Python within the step; all gradients are one node of the graph")
_ONE_POOL = ("1 operation at a time", "two at once would need twice the threads; Horovod waits outside the pool")


def _anywhere(chosen: dict[str, tuple[str, str]]) -> _Chosen:
    return {"cpu": chosen, "gpu": chosen}


# What a framework lacks that does not support this sharding; nothing where all do.
_LACKING = {
    "none": "",
    "optimizer": "",
    "gradients": "its gradients are all in memory at once",
    "parameters": "it does not free parameters between their uses",
}

# What of a model a rank trains along the axes of `parallel` that divide it.
DIVIDED = {"pipeline": "stages", "tensor": "parts"}
_KINDS = {
    "language_modeling": ("", "a GPT"),
    "image_classification": ("-resnet", "a ResNet"),
    "own": ("-own", "a model of one's own"),
}

# By device: what was chosen, how, and why.
CHOSEN: dict[str, _Chosen] = {
    "pytorch": {
        "cpu": {
            "images": ("channels last", "a step took 0.83 times the CPU time in one process with AVX2"),
            "gradients": _GROUP,
            "wait": ("sleeps, checking every 0.1 ms", "Horovod's own wait keeps the core busy, which reducing needs"),
        },
        "gpu": {
            "images": ("channels last", "the layout that tensor cores work with"),
            "gradients": ("each as backward finishes it", "the GPU computes while NCCL sends"),
        },
    },
    **dict.fromkeys(("tensorflow", "keras"), _anywhere({"step": _GRAPH, "gradients": _GROUP, "pool": _ONE_POOL})),
    "mxnet": _anywhere(
        {
            "step": ("hybridized, static memory and shapes", "one call of the engine per step, not per operation"),
            "gradients": _GROUP,
        }
    ),
}


def chosen(settings: Mapping[str, tuple[str, str]], recipe: Recipe) -> dict[str, tuple[str, str]]:
    """An adapter's settings for a device, as they are with this recipe."""
    ordered = ("during backward, in pieces, first layer first", "order is priority")
    return dict(settings) | ({"gradients": ordered} if recipe.order == "priority" else {})


def dividing(recipe: Recipe) -> dict[str, str]:
    """By axis of `parallel` that divides the recipe's model, the capability that it needs."""
    kind = _KINDS[recipe.model.TASK][0]
    return {axis: axis + kind for axis in DIVIDED if getattr(recipe.parallel, axis) > 1}


def unsupported(framework: str, capabilities: frozenset[str], recipe: Recipe, device: str) -> list[str]:
    """Error lines for what the recipe needs and a framework with these capabilities cannot do on `cpu` or `gpu`."""
    lines = []
    if not _supports(recipe.precision, capabilities, device):
        able = [name for name in PRECISIONS if _supports(name, capabilities, device)]
        lines.append(
            f"precision: {framework} cannot train in {recipe.precision} on a {device}; "
            f"expected one of {', '.join(able)}"
        )
    if recipe.recompute and "recompute" not in capabilities:
        lines.append(f"recompute: {framework} cannot compute activations again in backward; expected false")
    if recipe.order == "priority" and ("order" not in capabilities or device != "cpu"):
        lines.append(f"order: {framework} cannot update layers one by one on a {device}; expected none")
    for axis, needed in dividing(recipe).items() if recipe.parallel.divides else ():
        if needed not in capabilities or device != "cpu":
            what = f"{DIVIDED[axis]} of {_KINDS[recipe.model.TASK][1]}"
            lines.append(f"parallel.{axis}: {framework} does not train {what} on a {device} yet; expected 1")
    if recipe.parallel.chunks > 1 and "interleaved" not in capabilities:
        lines.append(f"parallel.schedule: {framework} does not train stages of several chunks yet; expected 1f1b")
    stages = [stage for stage, reason in _LACKING.items() if not reason or f"shard-{stage}" in capabilities]
    if recipe.sharding not in stages:
        why = f"{framework} cannot shard {recipe.sharding}, as {_LACKING[recipe.sharding]}"
        lines.append(f"sharding: {why}; expected one of {', '.join(stages)}")
    return lines


def check_can(adapter: Adapter, recipe: Recipe, topology: Topology) -> None:
    """Check that the framework supports the recipe on this rank's device. Raises RequestError."""
    if lines := unsupported(adapter.NAME, adapter.CAPABILITIES, recipe, topology.device):
        raise RequestError("\n".join(lines))


def _supports(precision: str, capabilities: frozenset[str], device: str) -> bool:
    if precision == "fp32":
        return True
    return (precision if device == "cpu" or precision == "fp64" else f"gpu-{precision}") in capabilities
