"""What one rank does in a step, from a profile: the times of layers and other work, and the gradients with their bytes.

All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import mean

import numpy as np

from hvdkit.adapters.capabilities import JOINS_GRADIENTS, REDUCES_AS_ONE
from hvdkit.recipe.schema import Recipe
from hvdkit.results.memory import Stage
from hvdkit.results.profile import Profile, Spread
from hvdkit.simulator import batch_curves
from hvdkit.simulator.batch_curves import BatchCurve, ComputeTimes
from hvdkit.simulator.piecewise_linear import Floats
from hvdkit.simulator.sharding import NO_STATES, STAGES, States, held_of, supported
from hvdkit.tasks.parts import block_of

FIXED_PART = 0.08  # of forward and backward: TensorFlow's published speeds at batch 32 and 64 (docs/simulator.md)
FIXED_PARTS = (0.0, 0.25)  # from where to where it may be
PER_DOUBLING = 5.0  # percent: of batch or input size, device speed, or the bytes of a collective beyond those measured


@dataclass(frozen=True)
class Gradient:
    """A gradient. `segment_s` is the backward time between the gradient that is finished before it and this one."""

    name: str
    layer: str
    shape: tuple[int, ...]
    bytes: int
    segment_s: float


@dataclass(frozen=True)
class Change:
    """What a what-if has changed: by what factors compute may take `shorter` or `longer` than expected, and a note."""

    shorter: float
    longer: float
    told: str


@dataclass(frozen=True, eq=False)  # hashed by identity, so that results for a workload can be cached
class Workload:
    """A step of one rank, without communication.

    `batch_size` is in samples per rank. `forward` has (layer, seconds) in the order of forward, `tensors` are in the
    order in which backward finishes them, and `tail_s` is what backward does after the last one. `update_s` is the
    update of all parameters. `serial_s` is the time between steps, with the input that nothing hides. An update may
    accumulate several batches: the last one's backward is in `tensors`, all work of the others in `earlier_s`. `jitter`
    is the coefficient of variation of compute. `compression_s` is the time to turn all gradients into what is sent and
    back, 0 if it was not measured. `state_bytes` are the model's states on a device, without sharding; zeros if only
    the process's memory is known. `recipe` and `framework` are those of the profile, where hvdkit knows its table, and
    `published` that it is of a published figure. `stages` are those of sharding that the framework has. With `joined`,
    gradients are parts of one vector, which is sent as it is; with `as_one` they are copied into one, and none comes
    back.
    `curve` has forward and backward at the batch sizes (samples per rank) that were measured, this one's among them;
    None if it is the only one.
    Speeds count the `unit`, such as tokens, of which a sample has `units_per_sample`. `shape` is a sample's, None if it
    is unknown. `changes` are those of what-ifs, which were made of the `given` workload.
    """

    name: str
    batch_size: int
    forward: tuple[tuple[str, float], ...]
    tensors: tuple[Gradient, ...]
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
    state_bytes: States = NO_STATES
    recipe: Recipe | None = None
    framework: str = ""
    published: bool = False
    stages: tuple[Stage, ...] = STAGES
    joined: bool = False
    as_one: bool = False
    curve: BatchCurve | None = None
    unit: str = "images"
    units_per_sample: int = 1
    precision: str = "fp32"
    fixed_part: float = FIXED_PART
    shape: tuple[int, ...] | None = None
    changes: tuple[Change, ...] = ()
    given: Workload | None = None

    @lru_cache(maxsize=4096)  # noqa: B019 - of all workloads together
    def parts(self, batch: float) -> ComputeTimes:
        """Forward and backward at `batch` times the batch size.

        They follow the curve. Without one, `fixed_part` of each part's time is assumed not to depend on the batch size.
        """
        forward, segments = ([seconds for _, seconds in self.forward], [tensor.segment_s for tensor in self.tensors])
        own = ComputeTimes(np.array(forward), np.array(segments), self.tail_s, self.earlier_s)
        if batch == 1:
            return own
        if self.curve is None:
            return batch_curves.unflat(self._without_curve(batch) * batch_curves.flat(own), len(forward))
        times, known = self.curve.at(batch * self.batch_size), self.curve.at(self.batch_size)
        # the curve of all parts together is shared among them as they are
        values = batch_curves.flat(own) * times / known if len(times) == 1 else times * (own.whole_s / known.sum())
        return batch_curves.unflat(values, len(forward))

    def compute_factor(self, batch: float) -> float:
        """Forward and backward at `batch` times the batch size, relative to that at the batch size itself."""
        own = self.compute_s
        return self.parts(batch).whole_s / own if own > 0 else self._without_curve(batch)

    def _without_curve(self, batch: float) -> float:
        return self.fixed_part + (1 - self.fixed_part) * batch

    @property
    def compute_s(self) -> float:
        """Forward and backward of all batches of an update."""
        return self.parts(1.0).whole_s

    @cached_property
    def blocks(self) -> int:
        """The blocks that have parameters."""
        return len({block_of(tensor.name) for tensor in self.tensors})

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all gradients."""
        return sum(tensor.bytes for tensor in self.tensors)

    @cached_property
    def sizes(self) -> Floats:
        """Bytes of each gradient, shape (tensors,)."""
        return np.array([float(tensor.bytes) for tensor in self.tensors])


def of_profile(profile: Profile) -> Workload:
    """One rank's own work in a profile."""
    split = profile.step
    names, shares = _forward(profile)
    compute = split.compute_ms.mean - _mean(split.compression_ms) - _mean(split.update_ms)
    backward = split.backward_ms.mean if split.backward_ms else None
    ready = np.array([tensor.ready_ms for tensor in profile.tensors])
    own = batch_curves.parts(max(0.0, compute), backward, profile.accumulate, shares, ready)
    tensors = tuple(
        Gradient(tensor.name, tensor.layer, tuple(tensor.shape), tensor.bytes, float(seconds))
        for tensor, seconds in zip(profile.tensors, own.segments, strict=True)
    )
    fixed, activations, states = _memory(profile)
    shards = 1 if sharding_of(profile) == "none" else profile.np  # of the update and the optimizer's state
    return Workload(
        name=profile.model,
        batch_size=profile.batch_size * profile.accumulate,
        forward=tuple(zip(names, map(float, own.forward), strict=True)),
        tensors=tensors,
        tail_s=own.tail_s,
        update_s=1e-3 * _mean(split.update_ms) * shards,
        earlier_s=own.earlier_s,
        serial_s=1e-3 * (split.gaps_ms.mean + split.input_ms.mean),
        jitter=_jitter(profile),
        compression_s=1e-3 * _mean(split.compression_ms) * sync_of(profile),
        fixed_memory_bytes=fixed,
        activation_bytes=activations,
        state_bytes=states,
        stages=supported(profile.framework),
        joined=profile.device == "cpu" and profile.framework in JOINS_GRADIENTS and profile.accumulate == 1,
        as_one=profile.device == "cpu" and profile.framework in REDUCES_AS_ONE,
        curve=batch_curves.of_profile(profile, shares),
        unit=profile.unit,
        units_per_sample=profile.units_per_sample,
    )


def sharding_of(profile: Profile) -> Stage:
    """The stage of sharding of a profile."""
    chosen = profile.settings.get("sharding")
    return next((stage for stage in STAGES if stage == chosen), "none")


def sync_of(profile: Profile) -> int:
    """The updates between two averages of the ranks of a profile: 1, except with Local SGD."""
    sync = profile.settings.get("sync")
    every = sync.get("every") if isinstance(sync, dict) else None
    return every if isinstance(every, int) and 1 <= every <= 2**31 else 1


def _mean(spread: Spread | None) -> float:
    return spread.mean if spread else 0.0


def _forward(profile: Profile) -> tuple[tuple[str, ...], list[float]]:
    """The layers whose forward is known, and their shares of it; one that stands for the model if none is."""
    known = [(layer.name, layer.forward_ms) for layer in profile.layers if layer.forward_ms is not None]
    total_ms = sum(ms for _, ms in known)
    if not total_ms:
        return ("model",), [1.0]
    return tuple(name for name, _ in known), [ms / total_ms for _, ms in known]


def _jitter(profile: Profile) -> float:
    """From the middle 80 % of each rank's compute: 2 × 1.2816 standard deviations of a normal distribution."""
    spreads = [rank.split.compute_ms for rank in profile.ranks]
    return mean((spread.high - spread.low) / 2.5631 / spread.mean if spread.mean > 0 else 0.0 for spread in spreads)


def _memory(profile: Profile) -> tuple[float, float, States]:
    """Bytes that do not depend on the batch size, those that do, and the model's states among the former.

    They are the device's; else the process's, most of whose memory does not depend on the batch.
    """
    memory, shards = profile.memory, 1 if sharding_of(profile) == "none" else profile.np
    if memory.device_peak_mib is None:
        return memory.peak_rss_mib * 2**20, 0.0, NO_STATES
    states = States(memory.parameter_bytes, memory.parameter_bytes, memory.optimizer_bytes * shards)
    kept = held_of(states, [tensor.shape for tensor in profile.tensors], profile.np, sharding_of(profile))
    return states.total, max(0.0, memory.device_peak_mib * 2**20 - kept.total), states
