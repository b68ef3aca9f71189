"""When backward finishes each gradient and how long each layer takes, from the detailed steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.state import layer_of
from hvdkit.errors import RunError
from hvdkit.profiling.breakdown import BACKWARD, FORWARD, TracedStep
from hvdkit.results.profile import ITEM_BYTES, Layer, Tensor
from hvdkit.results.recording import TensorRecord


def tensors(records: Sequence[TensorRecord], steps: Sequence[TracedStep], backward_ms: float) -> list[Tensor]:
    """Gradients in the order in which backward finishes them: medians over `steps`, the detailed ones of all ranks.

    Detailed steps take longer, so their times are scaled to a backward of `backward_ms`, as it is without details.
    Raises RunError if a gradient is in no step.
    """
    times: dict[str, list[float]] = {record.name: [] for record in records}
    for step in steps:
        phase = step.last(BACKWARD)
        for name, at in dict(step.details).items():  # the last event of each name
            bare = name.removeprefix(trace_events.READY)
            if name.startswith(trace_events.READY) and bare in times:
                share = (at - phase.start) / max(1, phase.end - phase.start)
                times[bare].append(min(1.0, max(0.0, share)))  # events of one instant may be in another order
    unseen = [name for name, measured in times.items() if not measured]
    if unseen:
        raise RunError(f"profile: no gradient was seen for {', '.join(unseen[:3])}; is the parameter trained?")
    rows = [
        Tensor(
            name=record.name,
            shape=record.shape,
            dtype=record.dtype,  # type: ignore[arg-type]  # the model checks it
            bytes=int(np.prod(record.shape, dtype=np.int64)) * ITEM_BYTES.get(record.dtype, 0),
            ready_ms=backward_ms * float(np.median(times[record.name])),
            layer=layer_of(record.name),
        )
        for record in records
    ]
    return sorted(rows, key=lambda tensor: tensor.ready_ms)


def backward_times(tensors: Sequence[Tensor], ready_ms: Sequence[float]) -> dict[str, float]:
    """Milliseconds of backward by layer: the sums of the times between a gradient and the one before it."""
    times: dict[str, float] = {}
    for tensor, ms in zip(tensors, np.diff(ready_ms, prepend=0.0), strict=True):
        times[tensor.layer] = times.get(tensor.layer, 0.0) + float(ms)
    return times


def layers(
    tensors: Sequence[Tensor], steps: Sequence[TracedStep], forward_ms: float, forward_known: bool
) -> list[Layer]:
    """Layers in the order of forward; `tensors` are what the function of that name returns.

    A layer's time begins when the layer before it ends. So an operation without weights, such as a ReLU or an addition,
    counts to the layer after it. The times of backward come from the readiness of the gradients.
    """
    backward = backward_times(tensors, [tensor.ready_ms for tensor in tensors])
    forward = _forward(steps, forward_ms) if forward_known else {}
    ordered = [name for name in forward if name in backward] or list(reversed(backward))
    ordered += [name for name in reversed(backward) if name not in ordered]
    kinds = {name: _kind([tensor for tensor in tensors if tensor.layer == name]) for name in backward}
    return [
        Layer(name=name, kind=kinds[name], forward_ms=forward.get(name), backward_ms=backward[name]) for name in ordered
    ]


def _forward(steps: Sequence[TracedStep], forward_ms: float) -> dict[str, float]:
    """Milliseconds of each layer, in the order of forward; scaled as in `tensors`."""
    shares: dict[str, list[float]] = {}
    for step in steps:
        phase = step.last(FORWARD)
        before = phase.start
        mine: dict[str, float] = {}
        for name, at in step.details:
            if name.startswith(trace_events.LAYER) and phase.start <= at <= phase.end:
                bare = name.removeprefix(trace_events.LAYER)
                mine[bare] = mine.get(bare, 0.0) + at - before
                before = at
        for bare, ns in mine.items():
            shares.setdefault(bare, []).append(ns / max(1, phase.end - phase.start))
    return {name: forward_ms * float(np.median(measured)) for name, measured in shares.items()}


def _kind(mine: Sequence[Tensor]) -> str:
    widest = max(len(tensor.shape) for tensor in mine)
    return {1: "norm", 2: "dense"}.get(widest, "conv" if widest in (3, 4, 5) else "other")
