"""A profile from one published figure: images or tokens per second of one device. Nothing is measured.

What the figure does not say is assumed: backward takes twice as long as forward, both are divided among the layers in
proportion to their multiply-adds, and input, update and the work between steps take no time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import hvdkit
from hvdkit.errors import Faults, nearest
from hvdkit.profiling.published_models import MODELS
from hvdkit.results.profile import (
    ITEM_BYTES,
    Layer,
    Link,
    Memory,
    Profile,
    ProfiledRank,
    Spread,
    StepSplit,
    Tensor,
    Tuning,
)
from hvdkit.tasks import gpt, resnet

Precision = Literal["fp32", "bf16", "fp16"]
NAMES = (*resnet.NAMES, *gpt.NAMES, *MODELS)
_DTYPES: dict[Precision, Any] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FORWARD = 1 / 3  # of compute
_KINDS: dict[int, Any] = {1: "norm", 2: "dense", 4: "conv"}  # by the dimensions of the weights
_SIDE = 224
_CLASSES = {32: 10, 224: 1000}  # by the usual side of the images: CIFAR-10 and ImageNet


def profile(
    model: str,
    images_per_second: float | None,
    batch_size: int,
    device: str,
    tokens_per_second: float | None = None,
    precision: Precision = "fp32",
    sequences_per_second: float | None = None,
    sequence_length: int | None = None,
    gradients: Precision = "fp32",
) -> Profile:
    """The profile of `model` on one `device` ("cpu", or a GPU's name) that trains so many images or tokens per second.

    `batch_size` is in images, or in windows of `sequence_length` tokens (None: a GPT's 1,024, BERT's 128, T5's 512), as
    `sequences_per_second` is; `precision` is that of the figure, `gradients` that in which they are sent. Raises
    RequestError with all faults.
    """
    faults = Faults()
    if model not in NAMES:
        faults.append(f"--from {model}: expected one of {', '.join(NAMES)}{nearest(model, NAMES)}; or profile a recipe")
    of_text = model in gpt.NAMES or (model in MODELS and MODELS[model].unit == "tokens")
    most = MODELS[model].most if model in MODELS else 1024
    length = sequence_length or (MODELS[model].size if model in MODELS else most)
    if sequence_length is not None and not (of_text and 1 <= sequence_length <= most):
        faults.append(f"--sequence-length {sequence_length}: expected 1 to {most} tokens, of a language model")
    speeds = {"images": images_per_second, "tokens": tokens_per_second, "sequences": sequences_per_second}
    given = [name for name, speed in speeds.items() if speed is not None]
    able = ["tokens", "sequences"] if of_text else ["images"]
    options = " or ".join(f"--{name}-per-second" for name in able)
    if model in NAMES and not given:
        faults.append(f"{options}: needed too, beside --from {model}")
    elif model in NAMES and not (len(given) == 1 and given[0] in able):
        wrong = next(name for name in given if name not in able or len(given) > 1)
        faults.append(f"--{wrong}-per-second: expected {options}, and only that, for {model}")
    for name in given:
        if not 0.1 <= (speeds[name] or 0.0) <= 1e9:
            faults.append(f"--{name}-per-second {speeds[name]:g}: expected those of one device, from 0.1 to 1e9")
    if not 1 <= batch_size <= 2**24:
        samples = "windows" if of_text else "images"
        faults.append(f"--batch-size {batch_size}: expected the {samples} of one device and step, 1 to {2**24}")
    if not (device.isprintable() and 0 < len(device.strip()) <= 100):
        faults.append(f"--device {device!r}: expected a name such as a100, or cpu")
    faults.report()
    speed = float(speeds[given[0]] or 0.0) * (length if given == ["sequences"] else 1)
    return _made(model, speed, batch_size, device.strip(), precision, length if of_text else 1, gradients)


def lines(profile: Profile) -> list[str]:
    """What was assumed, for the terminal."""
    return [
        f"{profile.model}: {profile.published}, {profile.step.step_ms.mean:.1f} ms a step",
        "not measured: the times of layers (by their multiply-adds, backward twice forward), input, update, jitter; "
        "predictions have wider intervals",
    ]


def _made(
    model: str, speed: float, batch_size: int, device: str, precision: Precision, units: int, gradients: Precision
) -> Profile:
    unit = "tokens" if units > 1 or model in gpt.NAMES else "images"
    if model in MODELS:
        unit = MODELS[model].unit
        shapes, work = MODELS[model].shapes, MODELS[model].work_by_layer(units if unit == "tokens" else _SIDE)
    elif model in gpt.NAMES:
        transformer = replace(gpt.published(model), context=units)
        shapes, work = gpt.published(model).parameter_shapes(), transformer.work_by_layer()
    else:
        side = resnet.architecture(model, 2).usual_side
        table = resnet.architecture(model, _CLASSES[side])
        shapes, work = table.parameter_shapes(), table.work_by_layer(side)  # by layer, in forward order
    step_ms = 1e3 * batch_size * units / speed
    forward_ms, all_work = step_ms * _FORWARD, sum(work.values())
    backward_ms = step_ms - forward_ms
    tensors, done, last = [], 0, ""
    for name, shape in reversed(shapes.items()):
        layer = name.rpartition(".")[0]
        if layer != last:
            done, last = done + work.get(layer, 0), layer
        ready, dtype = backward_ms * (done / all_work), _DTYPES[gradients]
        size = ITEM_BYTES[dtype] * math.prod(shape)
        tensors.append(Tensor(name=name, shape=list(shape), dtype=dtype, bytes=size, ready_ms=ready, layer=layer))
    layers = [
        Layer(
            name=name,
            kind=_KINDS.get(len(shapes.get(f"{name}.weight", ())), "other"),
            forward_ms=forward_ms * work.get(name, 0) / all_work,
            backward_ms=backward_ms * work.get(name, 0) / all_work,
        )
        for name in dict.fromkeys(name.rpartition(".")[0] for name in shapes)
    ]
    said = "" if precision == "fp32" else f" in {precision}"
    split = _split(step_ms, forward_ms, backward_ms)
    said += "" if gradients == "fp32" else f", gradients in {gradients}"
    said += f", windows of {units} tokens" if unit == "tokens" and (model in MODELS or units != 1024) else ""
    parameters = sum(4 * math.prod(tensor.shape) for tensor in tensors)
    return Profile(
        schema_version=1,
        hvdkit_version=hvdkit.__version__,
        published=f"a published figure, {speed:,.10g} {unit}/s on one {device} at batch size {batch_size}{said}",
        framework="published",
        framework_version="",
        horovod_version=None,
        recipe=f"{model}-{device}",
        settings={"model": {"name": model}, "batch_size": batch_size},
        model=model,
        np=1,
        hosts=1,
        launcher="",
        device="cpu" if device.lower() == "cpu" else "cuda",
        processor=device,
        threads=1,
        batch_size=batch_size,
        unit=unit,
        units_per_sample=units,
        accumulate=1,
        precision=precision,
        compression="none",
        measured_steps=1,
        tensors=tensors,
        layers=layers,
        step=split,
        ranks=[ProfiledRank(rank=0, host="", clock_offset_ms=0.0, clock_error_ms=0.0, split=split)],
        slowest=None,
        bound="compute",
        communications=[],
        bytes_per_step=0,
        latencies=[],
        link=Link(interface=None, rated_mbit_per_s=None, measured_mbit_per_s=None, achieved_mbit_per_s=None),
        tuning=Tuning(cycle_time_ms=1.0, fusion_threshold_bytes=64 * 2**20, cache_capacity=1024),
        memory=Memory(parameter_bytes=parameters, optimizer_bytes=parameters, peak_rss_mib=0.0, device_peak_mib=None),
        cost=None,
    )


def _split(step_ms: float, forward_ms: float, backward_ms: float) -> StepSplit:
    def spread(ms: float) -> Spread:
        return Spread(mean=ms, median=ms, low=ms, high=ms)

    nothing = spread(0.0)
    rest: dict[str, Any] = dict.fromkeys(StepSplit.model_fields, nothing)
    own = {"forward_ms": spread(forward_ms), "backward_ms": spread(backward_ms), "compression_ms": None}
    return StepSplit(**rest | own | {"compute_ms": spread(step_ms), "update_ms": None, "step_ms": spread(step_ms)})
