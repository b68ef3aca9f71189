"""By tensor and layer: when backward has finished which gradient, how long each layer takes; from detailed steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.state import layer_of
from hvdkit.errors import RunError
from hvdkit.profiling.split import BACKWARD, FORWARD, Phase, Step
from hvdkit.results.profile import ITEM_BYTES, Layer, Tensor
from hvdkit.results.recording import TensorRecord


def tensors(records: Sequence[TensorRecord], steps: Sequence[Step], backward_ms: float) -> list[Tensor]:
    """Gradients in the order in which backward finishes them: medians over `steps`, all ranks' detailed ones.

    Detailed steps take longer, so their times are scaled to a backward of `backward_ms`, as it was without details.
    Raises RunError where a gradient was seen in no step.
    """
    times: dict[str, list[float]] = {record.name: [] for record in records}
    for step in steps:
        phase = _last(step, BACKWARD)
        for name, at in dict(step.details).items():  # the last of each
            bare = name.removeprefix(trace_events.READY)
            if name.startswith(trace_events.READY) and bare in times:
                share = (at - phase.start) / max(1, phase.end - phase.start)
                times[bare].append(min(1.0, max(0.0, share)))  # marks of an instant may come in another order
    unseen = [name for name, found in times.items() if not found]
    if unseen:
        raise RunError(f"profile: no gradient was seen for {', '.join(unseen[:3])}; is the parameter trained?")
    found = [
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
    return sorted(found, key=lambda tensor: tensor.ready_ms)


def layers(found: Sequence[Tensor], steps: Sequence[Step], forward_ms: float, tells_forward: bool) -> list[Layer]:
    """Layers in the order in which forward comes by; `found` is what `tensors` gives.

    A layer's time goes from where the one before had ended to its own end, so what has no weights, such as a ReLU or an
    addition, counts to the layer behind it. Backward's come from the tensors' readiness, which tells them everywhere.
    """
    backward: dict[str, float] = {}
    before = 0.0
    for tensor in found:
        backward[tensor.layer] = backward.get(tensor.layer, 0.0) + tensor.ready_ms - before
        before = tensor.ready_ms
    forward = _forward(steps, forward_ms) if tells_forward else {}
    ordered = [name for name in forward if name in backward] or list(reversed(backward))
    ordered += [name for name in reversed(backward) if name not in ordered]
    kinds = {name: _kind([tensor for tensor in found if tensor.layer == name]) for name in backward}
    return [
        Layer(name=name, kind=kinds[name], forward_ms=forward.get(name), backward_ms=backward[name]) for name in ordered
    ]


def _forward(steps: Sequence[Step], forward_ms: float) -> dict[str, float]:
    """Milliseconds of each layer, in the order in which they come by; scaled as in `tensors`."""
    shares: dict[str, list[float]] = {}
    for step in steps:
        phase, before = _last(step, FORWARD), None
        mine: dict[str, float] = {}
        for name, at in step.details:
            if not name.startswith(trace_events.LAYER) or not phase.start <= at <= phase.end:
                continue
            bare = name.removeprefix(trace_events.LAYER)
            mine[bare] = mine.get(bare, 0.0) + at - (phase.start if before is None else before)
            before = at
        for bare, ns in mine.items():
            shares.setdefault(bare, []).append(ns / max(1, phase.end - phase.start))
    return {name: forward_ms * float(np.median(found)) for name, found in shares.items()}


def _last(step: Step, kind: str) -> Phase:
    """The one whose gradients are sent, where several batches make an update."""
    return [phase for phase in step.phases if phase.kind == kind][-1]


def _kind(mine: Sequence[Tensor]) -> str:
    widest = max(len(tensor.shape) for tensor in mine)
    return {1: "norm", 2: "dense"}.get(widest, "conv" if widest in (3, 4, 5) else "other")
