"""What one rank does in a step, taken from a profile: tasks with their times, tensors with their bytes. Seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import mean

from hvdkit.results.profile import Profile, Spread


@dataclass(frozen=True)
class Tensor:
    """A gradient. `segment_s` is the backward time between the tensor that was finished before it and this one."""

    name: str
    layer: str
    shape: tuple[int, ...]
    bytes: int
    segment_s: float


@dataclass(frozen=True, eq=False)  # told apart by identity, so that what is worked out for one can be kept
class Workload:
    """A step of one rank that communicates with nobody.

    `forward` has (layer, seconds) in the order of the computation, `tensors` come as backward finishes them, and
    `tail_s` is what backward does after the last one. `serial_s` is what lies between steps, exposed input included;
    `jitter` the coefficient of variation of its compute; `compression_s` what it took to make of all gradients
    what is sent, and back, 0 where that was not measured. `batch_size` images a rank; `accumulate` batches an update,
    of which the last one's backward lies in `tensors` and the others' work in `earlier_s`.
    """

    name: str
    batch_size: int
    forward: tuple[tuple[str, float], ...]
    tensors: tuple[Tensor, ...]
    tail_s: float = 0.0
    update_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    copy_bytes: int = 0
    serial_s: float = 0.0
    earlier_s: float = 0.0
    jitter: float = 0.0
    compression_s: float = 0.0
    fixed_memory_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def forward_s(self) -> float:
        """Of one batch."""
        return sum(seconds for _, seconds in self.forward)

    @property
    def backward_s(self) -> float:
        """Of one batch, to the end of what comes behind the last gradient."""
        return sum(tensor.segment_s for tensor in self.tensors) + self.tail_s

    @property
    def compute_s(self) -> float:
        """All that the device does in a step, input and communication left out."""
        return self.earlier_s + self.forward_s + self.backward_s + self.update_s

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients together, as they are before compression."""
        return sum(tensor.bytes for tensor in self.tensors)


def of_profile(profile: Profile) -> Workload:
    """What a profile says of one rank's own work.

    Where the framework could not tell forward from backward, backward ends with its last gradient and the rest is
    forward. Medians of single tensors are stretched to the mean of the whole.
    """
    split = profile.step
    compute = split.compute_ms.mean - _mean(split.compression_ms)
    last_ready = profile.tensors[-1].ready_ms
    update = _mean(split.update_ms)
    backward = split.backward_ms.mean if split.backward_ms else min(last_ready, compute - update)
    # the accumulated batches before the last one have finished when backward begins to count
    earlier = (compute - update) * (1 - 1 / profile.accumulate)
    backward = max(0.0, min(backward, compute - update))
    last_backward = backward / profile.accumulate if split.backward_ms else backward
    forward = max(0.0, compute - update - earlier - last_backward)
    stretch = min(1.0, last_backward / last_ready) if last_ready > 0 else 0.0
    before, tensors = 0.0, []
    for tensor in profile.tensors:
        ready = tensor.ready_ms * stretch
        tensors.append(
            Tensor(tensor.name, tensor.layer, tuple(tensor.shape), tensor.bytes, 1e-3 * max(0.0, ready - before))
        )
        before = max(before, ready)
    fixed, activations = _memory(profile)
    return Workload(
        name=profile.model,
        batch_size=profile.batch_size * profile.accumulate,
        forward=_forward(profile, forward),
        tensors=tuple(tensors),
        tail_s=1e-3 * max(0.0, last_backward - before),
        update_s=1e-3 * update,
        earlier_s=1e-3 * earlier,
        serial_s=1e-3 * (split.gaps_ms.mean + split.input_ms.mean),
        jitter=_jitter(profile),
        compression_s=1e-3 * _mean(split.compression_ms) * sync_of(profile),
        fixed_memory_bytes=fixed,
        activation_bytes=activations,
    )


def of_layers(
    name: str, batch_size: int, layers: Sequence[tuple[str, float, float, int]], update_s: float = 0.0
) -> Workload:
    """From published tables: layers in forward order, each (name, forward s, backward s, gradient bytes)."""
    tensors, pending = [], 0.0
    for layer, _, backward, size in reversed(layers):
        pending += backward
        if size:
            tensors.append(Tensor(layer, layer, (size // 4,), size, pending))
            pending = 0.0
    forward = tuple((layer, seconds) for layer, seconds, _, _ in layers)
    return Workload(name, batch_size, forward, tuple(tensors), tail_s=pending, update_s=update_s)


def elements(tensor: Tensor) -> int:
    """How many numbers a gradient has."""
    return prod(tensor.shape)


def sync_of(profile: Profile) -> int:
    """After how many updates the ranks of a profile met: 1, but for Local SGD."""
    sync = profile.settings.get("sync")
    every = sync.get("every") if isinstance(sync, dict) else None
    return every if isinstance(every, int) and 1 <= every <= 2**31 else 1


def _mean(spread: Spread | None) -> float:
    return spread.mean if spread else 0.0


def _forward(profile: Profile, forward_ms: float) -> tuple[tuple[str, float], ...]:
    known = [(layer.name, layer.forward_ms) for layer in profile.layers if layer.forward_ms is not None]
    whole = sum(ms for _, ms in known)
    if not whole:
        return (("network", 1e-3 * forward_ms),)
    return tuple((name, 1e-3 * ms * forward_ms / whole) for name, ms in known)


def _jitter(profile: Profile) -> float:
    """From the middle 80 % of each rank's own compute, as if it were normal: 2 × 1.2816 standard deviations wide."""
    spreads = [rank.split.compute_ms for rank in profile.ranks]
    return mean((each.high - each.low) / 2.5631 / each.mean if each.mean > 0 else 0.0 for each in spreads)


def _memory(profile: Profile) -> tuple[float, float]:
    """(what does not depend on the batch, what does), bytes: of the device, else of the process."""
    memory = profile.memory
    fixed = 2.0 * memory.parameter_bytes + memory.optimizer_bytes
    if memory.device_peak_mib is None:
        return memory.peak_rss_mib * 2**20, 0.0  # a process's memory has too much in it that no batch explains
    return fixed, max(0.0, memory.device_peak_mib * 2**20 - fixed)
