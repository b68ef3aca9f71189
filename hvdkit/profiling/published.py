"""A profile of a ResNet from one published figure: images per second of one device. Nothing is measured.

What the figure does not say is assumed: backward takes twice as long as forward, both are divided among the layers in
proportion to their multiply-adds, gradients are float32, and input, update and the work between steps take no time.
"""

from __future__ import annotations

import math
from typing import Any

import hvdkit
from hvdkit.errors import Faults, nearest
from hvdkit.results.profile import Layer, Link, Memory, Profile, Rank, Split, Spread, Tensor, Tuning
from hvdkit.tasks import resnet

_FORWARD = 1 / 3  # of compute
_CLASSES = {32: 10, 224: 1000}  # by the usual side of the images: CIFAR-10 and ImageNet


def profile(model: str, images_per_second: float, batch_size: int, device: str) -> Profile:
    """The profile of `model` on one `device` ("cpu", or a GPU's name) that trains so many images per second.

    `batch_size` is in images. Raises RequestError with all faults.
    """
    faults = Faults()
    if model not in resnet.NAMES:
        known = ", ".join(resnet.NAMES)
        faults.append(f"--from {model}: expected one of {known}{nearest(model, resnet.NAMES)}; or profile a recipe")
    if not 0.1 <= images_per_second <= 1e9:
        faults.append(f"--images-per-second {images_per_second:g}: expected those of one device, from 0.1 to 1e9")
    if not 1 <= batch_size <= 2**24:
        faults.append(f"--batch-size {batch_size}: expected the images of one device and step, 1 to {2**24}")
    if not (device.isprintable() and 0 < len(device.strip()) <= 100):
        faults.append(f"--device {device!r}: expected a name such as a100, or cpu")
    faults.report()
    return _made(model, float(images_per_second), batch_size, device.strip())


def lines(found: Profile) -> list[str]:
    """What was assumed, for the terminal."""
    return [
        f"{found.model}: {found.published}, {found.step.step_ms.mean:.1f} ms a step",
        "not measured: the times of layers (by their multiply-adds, backward twice forward), input, update, jitter; "
        "predictions have wider intervals",
    ]


def _made(model: str, images_per_second: float, batch_size: int, device: str) -> Profile:
    side = resnet.architecture(model, 2).usual_side
    table = resnet.architecture(model, _CLASSES[side])
    step_ms = 1e3 * batch_size / images_per_second
    forward_ms, work = step_ms * _FORWARD, table.work_by_layer(side)
    backward_ms, whole = step_ms - forward_ms, sum(work.values())
    shapes = table.parameter_shapes()
    tensors, done, last = [], 0, ""
    for name, shape in reversed(shapes.items()):
        layer = name.rpartition(".")[0]
        if layer != last:
            done, last = done + work.get(layer, 0), layer
        size, ready = 4 * math.prod(shape), backward_ms * (done / whole)
        tensors.append(Tensor(name=name, shape=list(shape), dtype="float32", bytes=size, ready_ms=ready, layer=layer))
    layers = [
        Layer(
            name=name,
            kind="dense" if name == "fc" else "conv" if name in work else "norm",
            forward_ms=forward_ms * work.get(name, 0) / whole,
            backward_ms=backward_ms * work.get(name, 0) / whole,
        )
        for name in dict.fromkeys(name.rpartition(".")[0] for name in shapes)
    ]
    split = _split(step_ms, forward_ms, backward_ms)
    parameters = sum(tensor.bytes for tensor in tensors)
    return Profile(
        schema_version=1,
        hvdkit_version=hvdkit.__version__,
        published=f"a published figure, {images_per_second:,.10g} images/s on one {device} at batch size {batch_size}",
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
        accumulate=1,
        precision="fp32",
        compression="none",
        measured_steps=1,
        tensors=tensors,
        layers=layers,
        step=split,
        ranks=[Rank(rank=0, host="", clock_offset_ms=0.0, clock_error_ms=0.0, split=split)],
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


def _split(step_ms: float, forward_ms: float, backward_ms: float) -> Split:
    def spread(ms: float) -> Spread:
        return Spread(mean=ms, median=ms, low=ms, high=ms)

    nothing = spread(0.0)
    rest: dict[str, Any] = dict.fromkeys(Split.model_fields, nothing)
    own = {"forward_ms": spread(forward_ms), "backward_ms": spread(backward_ms), "compression_ms": None}
    return Split(**rest | own | {"compute_ms": spread(step_ms), "update_ms": None, "step_ms": spread(step_ms)})
