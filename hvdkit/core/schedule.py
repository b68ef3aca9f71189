"""The learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdkit.recipe.schema import Schedule


@dataclass(frozen=True)
class LearningRate:
    """Learning rate as a function of the step, the same in every framework.

    `peak` is the rate for the actual global batch. During the first `warmup` steps the rate rises linearly from `start`
    to `peak`; then it decays until step `total`. `milestones` are in steps; `gamma` is the factor at each milestone. A
    step is one update.
    """

    start: float
    peak: float
    warmup: int
    total: int
    decay: str
    milestones: tuple[float, ...]
    gamma: float
    power: float

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0."""
        if step < self.warmup:
            return self.start + (self.peak - self.start) * step / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.decay == "cosine":
            # Loshchilov and Hutter 2017, equation 5, one cycle down to 0
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.decay == "polynomial":
            return self.peak * math.pow(1.0 - progress, self.power)  # You et al. 2017, section 5, with power 2 there
        return self.peak * self.gamma ** sum(step >= milestone for milestone in self.milestones)


def scaled_rate(
    reference: float, schedule: Schedule, *, batch_size: int, size: int, epochs: int, steps_per_epoch: int
) -> LearningRate:
    """The learning rate for `size` ranks that each contribute `batch_size` samples to an update.

    Linear scaling (Goyal et al. 2017, section 2.1): if the global batch is k times the base batch, the rate is k
    times the reference, and warm-up starts from the reference (section 2.2). Without scaling it starts from (almost) 0,
    as is usual for transformers. `steps_per_epoch` counts updates.
    """
    linear, warmup = schedule.scale == "linear", round(schedule.warmup_epochs * steps_per_epoch)
    factor = batch_size * size / schedule.base_batch_size if linear else 1.0
    return LearningRate(
        start=reference if linear else reference / (warmup + 1),
        peak=reference * factor,
        warmup=warmup,
        total=epochs * steps_per_epoch,
        decay=schedule.decay,
        milestones=tuple(milestone * steps_per_epoch for milestone in schedule.milestones),
        gamma=schedule.gamma,
        power=schedule.power,
    )
