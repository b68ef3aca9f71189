"""The rows of batch-sizes.json.gz: forward and backward at a batch size that was left out of a profile.

Each round is a profile at three batch sizes. One of them is left out, and its time is predicted from the others: in the
middle by interpolation, the smallest by what lies beyond. `layers` compares the single layers, once by a curve for each
and once by the curve of the whole step, which scales all of them alike.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import anchored
from benchmarks.anchored import Row
from hvdkit.results.profile import Profile
from hvdkit.simulator.calibration import LONE, calibrate
from hvdkit.simulator.piecewise_linear import Floats
from hvdkit.simulator.predict import point
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.workload import Workload, of_profile

HERE = Path(__file__).resolve().parent
SET = "batch sizes"


def rows() -> Iterator[Row]:
    """All of them; nothing where it was not measured."""
    for framework, rounds in profiles().items():
        for held in _held(rounds[0]):
            for number, whole in enumerate(rounds, 1):
                kept = without(whole, held)
                found = point(calibrate(kept), LONE, 1, Settings(batch_size=held))
                part = held / kept.batch_size
                predicted, measured = (1e3 * of_profile(each).parts(part).whole_s for each in (kept, whole))
                low, high = (predicted * ms / found.step_ms for ms in (found.low_ms, found.high_ms))
                label = f"{framework}, batch {held} left out, round {number}"
                linear = 1e3 * part * of_profile(whole).compute_s
                yield Row(SET, label, "ms", predicted, measured, "validation", low, high, linear)


def layers() -> list[dict[str, Any]]:
    """For each framework and batch size that is left out, medians over the rounds, in percent.

    `curves` and `whole` are the errors of layers, by a curve each and by that of the step: the sum of absolute errors
    over the sum of the times. `again` is how far two rounds of the same measurement are apart by that measure.
    `ready_curves`, `ready_whole` and `ready_again` are the mean errors of when gradients are ready, of backward.
    """
    found = []
    for framework, rounds in profiles().items():
        for held in _held(rounds[0]):
            left = [without(whole, held) for whole in rounds]
            measured, kept, alike = (
                [of_profile(each) for each in some] for some in (rounds, left, map(_scaled_alike, left))
            )
            part = held / rounds[0].batch_size
            one: dict[str, Any] = {"framework": framework, "held": held, "rounds": len(rounds)}
            for prefix, of in (("", _layers), ("ready_", _ready)):
                one[f"{prefix}curves"] = _median(of, zip(kept, measured, strict=True), part)
                one[f"{prefix}whole"] = _median(of, zip(alike, measured, strict=True), part)
                one[f"{prefix}again"] = _median(of, itertools.combinations(measured, 2), part)
            found.append(one)
    return found


def without(profile: Profile, size: int) -> Profile:
    """The profile as if that batch size had not been measured."""
    return profile.model_copy(update={"batches": [each for each in profile.batches if each.batch_size != size]})


@cache
def profiles() -> dict[str, list[Profile]]:
    """The rounds by framework; nothing where nothing was measured."""
    file = HERE / "batch-sizes.json.gz"
    kept = anchored.measured(file)["profiles"] if file.exists() else {}
    return {
        framework: [Profile.model_validate_json(json.dumps(rounds[0] | one)) for one in rounds]
        for framework, rounds in kept.items()
    }


def _held(profile: Profile) -> list[int]:
    """The batch sizes to leave out: all but the profile's own."""
    return [each.batch_size for each in profile.batches if each.batch_size != profile.batch_size]


def _scaled_alike(profile: Profile) -> Profile:
    nothing: dict[str, list[float]] = {"layer_forward_ms": [], "tensor_ready_ms": []}
    return profile.model_copy(update={"batches": [each.model_copy(update=nothing) for each in profile.batches]})


def _median(
    of: Callable[[Workload, float], tuple[Floats, float]], pairs: Iterable[tuple[Workload, Workload]], part: float
) -> float:
    """In percent; 0 where there is no pair, as of one round."""
    errors = []
    for predicted, measured in pairs:
        (found, _), (known, whole) = of(predicted, part), of(measured, part)
        errors.append(100 * float(np.abs(found - known).sum()) / whole)
    return median(errors or [0.0])


def _layers(work: Workload, part: float) -> tuple[Floats, float]:
    """Forward and backward of each layer, and the sum."""
    names = list(dict.fromkeys(tensor.layer for tensor in work.tensors))
    parts, backward = work.parts(part), np.zeros(len(names))
    for tensor, seconds in zip(work.tensors, parts.segments, strict=True):
        backward[names.index(tensor.layer)] += seconds
    found = np.concatenate([parts.forward, backward])
    return found, float(found.sum())


def _ready(work: Workload, part: float) -> tuple[Floats, float]:
    """When gradients are ready, and the sum of backward over all of them."""
    parts = work.parts(part)
    return parts.segments.cumsum(), len(parts.segments) * parts.backward_s
