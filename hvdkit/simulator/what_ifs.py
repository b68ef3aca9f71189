"""What-ifs that change a rank's own work: recomputed activations, another precision, samples of another size.

Each makes another workload of the profile's. It was not measured, so each widens the interval and has a note.
Accumulation is no such change: it takes the same work more often (`Case.accumulate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from hvdkit import tasks
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.profiling import published_models
from hvdkit.results.memory import Parts
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.simulator import memory
from hvdkit.simulator.batch_curves import ComputeTimes, flat
from hvdkit.simulator.cluster import Device
from hvdkit.simulator.piecewise_linear import Floats
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.workload import FIXED_PART, FIXED_PARTS, PER_DOUBLING, Change, Workload
from hvdkit.tasks.gpt import GPT
from hvdkit.tasks.resnet import ResNet

# How many times as fast forward and backward are in 16 bits as in fp32, and from where to where 9 of 10 lie: published
# pairs on V100s and A100s (tests/test_what_ifs.py), whose tensor cores compute in it.
HALF, HALF_LEAST, HALF_MOST = 2.7, 1.6, 4.1
_ALIKE = 1.1  # between fp16 and bf16
AGAIN = 1.06  # by what factor compute with a recomputed forward may be off
_HALVES = {"none": (), "fp16": ("fp16",), "bf16": ("fp16", "bf16")}  # by a device's `half_precision`
Size = tuple[int, ...]


def refusal(work: Workload, settings: Settings, device: Device) -> str | None:
    """Why the settings are impossible for a profile's workload, with the key and what to do; None if they are not."""
    asked, own = settings.precision, work.precision
    if settings.recompute is False and _recomputes(work):
        return "recompute: expected true, as in the profile, got false; profile the recipe without it"
    if settings.recompute and work.framework in FRAMEWORKS and "recompute" not in CAPABILITIES[work.framework]:
        return f"recompute: {work.framework} cannot compute activations again in backward; leave it out"
    if asked not in (None, own) and own == "fp64":
        return f"precision: expected fp64, as in the profile, got {asked}; profile the recipe in fp32"
    if asked not in (None, own) and device.memory_mib is None:
        slower = f"{device.name}, which has no memory of its own, is taken for a CPU, and CPUs may be slower in {asked}"
        return f"precision: {slower}; profile the recipe in it"
    if asked not in (None, own, "fp32", *_HALVES[device.half_precision]):
        known = ", ".join(_HALVES[device.half_precision]) or "fp32 alone"
        return (
            f"precision: {device.name}s are known to compute in {known}, got {asked}; leave it out, or say "
            "device.half_precision in the cluster file"
        )
    for key, fits in (("image_size", work.unit != "tokens"), ("sequence_length", work.unit == "tokens")):
        size = getattr(settings, key)
        if size and not (fits and work.shape and _work_by_layer(work, _shape(work, size))):
            kind = "language model" if key == "sequence_length" else "model of images"
            return f"{key}: expected a {kind} whose layers hvdkit knows, got {work.name}; leave it out"
    return None


def applied(work: Workload, settings: Settings, device: Device) -> Workload:
    """The workload with what the settings change of it, the same object each time; itself where that is nothing.

    What `refusal` refuses is left as it is.
    """
    asked = settings.recompute, settings.precision, settings.image_size, settings.sequence_length
    if asked == (None,) * 4 or refusal(work, settings, device):
        return work
    again = bool(settings.recompute) and not _recomputes(work)
    precision = settings.precision or work.precision
    size = settings.sequence_length or settings.image_size
    shape = _shape(work, size) if size else work.shape
    return _changed(work, again, precision, shape)


@lru_cache(maxsize=1024)
def _changed(work: Workload, again: bool, precision: str, shape: Size | None) -> Workload:
    """Smaller or larger samples first, then the forward that is computed again, then how fast all of that is."""
    made = work
    if shape != work.shape and shape:
        made = _resized(made, shape)
    if again:
        made = _recomputed(made)
    if precision != work.precision:
        made = _in_precision(made, precision)
    return made if made is work else _with_memory(work, made)


def _resized(work: Workload, shape: Size) -> Workload:
    """Each layer takes as much longer as it has more multiply-adds, but for a part that does not depend on them."""
    before, after = _work_by_layer(work, work.shape or shape), _work_by_layer(work, shape)
    whole = sum(after.values()) / sum(before.values())

    def factor(layer: str) -> float:
        return FIXED_PART + (1 - FIXED_PART) * (after[layer] / before[layer] if before.get(layer) else whole)

    made = _scaled(
        work,
        np.array([factor(name) for name, _ in work.forward]),
        np.array([factor(tensor.layer) for tensor in work.tensors]),
        factor(""),
    )
    times = made.compute_s / work.compute_s if work.compute_s > 0 else 1.0
    bounds = [fixed + (1 - fixed) * whole for fixed in FIXED_PARTS]
    far = 1 + PER_DOUBLING / 100 * abs(np.log2(whole))
    told = f"samples of {' × '.join(map(str, shape))} were not measured: layers take time by their multiply-adds"
    doubt = Change(far * max(1.0, times / min(bounds)), far * max(1.0, max(bounds) / times), told)
    text = work.unit == "tokens"
    return replace(
        made,
        shape=shape,
        fixed_part=work.fixed_part / times,  # the same time as before
        units_per_sample=shape[0] if text else work.units_per_sample,
        copy_bytes=round(work.copy_bytes * prod(shape) / prod(work.shape or shape)),
        changes=(*work.changes, doubt),
    )


def _recomputed(work: Workload) -> Workload:
    """Backward takes the forward of all blocks longer; what is in no block is not computed again."""
    own = work.parts(1.0)
    blocks = [seconds for name, seconds in work.forward if name == "model" or any(map(str.isdigit, name.split(".")))]
    again_s = sum(blocks)
    backward = 1 + again_s / own.backward_s if own.backward_s > 0 else 1.0
    made = _scaled(work, np.ones(len(work.forward)), np.full(len(work.tensors), backward), backward)
    both = own.forward_s + own.backward_s
    made = replace(made, earlier_s=work.earlier_s * (1 + again_s / both if both > 0 else 1.0))
    recipe = work.recipe and work.recipe.model_copy(update={"recompute": True})
    told = "recompute was not measured: backward is taken to have the blocks' forward once more"
    return replace(made, recipe=recipe, changes=(*work.changes, Change(AGAIN, AGAIN, told)))


def _in_precision(work: Workload, precision: str) -> Workload:
    """Forward and backward are as much faster as such devices are; the update and what is sent stay in fp32."""
    faster, shorter, longer = HALF, HALF_MOST / HALF, HALF / HALF_LEAST
    if precision == "fp32":
        faster, shorter, longer = 1 / faster, longer, shorter
    elif work.precision != "fp32":
        faster, shorter, longer = 1.0, _ALIKE, _ALIKE
    made = _scaled(work, np.full(len(work.forward), 1 / faster), np.full(len(work.tensors), 1 / faster), 1 / faster)
    recipe = work.recipe and work.recipe.model_copy(update={"precision": precision})
    told = f"{precision} was not measured: published pairs are {HALF:g} times as fast in 16 bits as in fp32, "
    change = Change(shorter, longer, f"{told}from {HALF_LEAST:g} to {HALF_MOST:g}")
    return replace(made, recipe=recipe, precision=precision, changes=(*work.changes, change))


def _scaled(work: Workload, forward: Floats, segments: Floats, rest: float) -> Workload:
    """With times by these factors, shapes (layers,) and (tensors,); `rest` is that of what is after the last gradient.

    The batches before the last one take the mean of them.
    """
    own = work.parts(1.0)
    one = own.forward_s + own.backward_s
    new = float(own.forward @ forward + own.segments @ segments) + own.tail_s * rest
    mean = new / one if one > 0 else rest
    curve = work.curve
    if curve:
        whole = curve.seconds.shape[1] == 1
        times = np.array([mean]) if whole else flat(ComputeTimes(forward, segments, rest, mean))
        curve = replace(curve, seconds=curve.seconds * times, below=curve.below * times, above=curve.above * times)
    return replace(
        work,
        forward=tuple((name, s * float(f)) for (name, s), f in zip(work.forward, forward, strict=True)),
        tensors=tuple(
            replace(tensor, segment_s=tensor.segment_s * float(f))
            for tensor, f in zip(work.tensors, segments, strict=True)
        ),
        tail_s=work.tail_s * rest,
        earlier_s=work.earlier_s * mean,
        curve=curve,
    )


def _with_memory(work: Workload, made: Workload) -> Workload:
    """What was measured of a device's memory, by as much less or more as the model's table has.

    Of a process's, which is a CPU's, the measured value stays: recompute did not change its peak (docs/simulator.md).
    """
    made = replace(made, given=work)
    before, after = counted(work), counted(made)
    if before is None or after is None or not before.activations or not work.state_bytes.total:
        return made
    new, old = ((parts.activations or 0) + (parts.batch or 0) for parts in (after, before))
    return replace(
        made,
        activation_bytes=work.activation_bytes * new / old,
        fixed_memory_bytes=max(0.0, work.fixed_memory_bytes + after.casts - before.casts),
    )


def counted(work: Workload, gpu: bool = False, **keys: Any) -> Parts | None:
    """What `hvdkit memory` counts of a rank alone, with other `keys` of the recipe; None where it knows no recipe."""
    if work.recipe is None or work.shape is None:
        return None
    framework = memory.framework_of(work.framework)
    return memory.parts(work.recipe.model_copy(update=keys), work.shape, framework, gpu, 1, "none")


def _recomputes(work: Workload) -> bool:
    return bool(work.recipe and work.recipe.recompute)


def _shape(work: Workload, size: int) -> Size:
    """Of a sample with a window of so many tokens, or as many pixels a side."""
    return (size,) if work.unit == "tokens" else (size, size, *(work.shape or (0, 0, 3))[2:])


def _work_by_layer(work: Workload, shape: Size) -> Mapping[str, float]:
    """Multiply-adds of a sample's forward by layer; empty where they are unknown."""
    if work.recipe is None:
        known = published_models.MODELS.get(work.name)
        return known.work_by_layer(shape[0]) if known else {}
    table = tasks.choose(work.recipe).architecture(work.shape)
    if isinstance(table, GPT):
        return {name: shape[0] * amount for name, amount in replace(table, context=shape[0]).work_by_layer().items()}
    if isinstance(table, ResNet):
        return table.work_by_layer(*shape[:2])
    return {}
