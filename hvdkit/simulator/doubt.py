"""How far a prediction may be off: 90 % intervals, from what was measured and from stated priors for what was not.

Compute and communication have an error each, as factors by which they may take less or more time. An error begins with
what was measured: the model's error on the profile's own step, the distance of measured collectives from their curve.
Each thing that was not measured adds a prior (the constants below), in proportion to its distance: doublings of ranks,
bytes, batch size or device speed. Errors of different origin are independent, so their squares add up.

Both errors are then put into the simulation, since a step that is bound by compute is not less certain because a link
is unknown. Communication is at least as uncertain as compute, so that an interval does not narrow as the part of
communication grows with the ranks, nor widen as a better link makes it smaller. What still narrows, such as where
buckets change, is kept as wide as with fewer ranks (`forecast.forecasts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.compression_costs import SELECTION_TOLD
from hvdkit.simulator.step import Case
from hvdkit.simulator.workload import FIXED_PARTS, PER_DOUBLING

# Priors in percent, each half the width of a 90 % interval.
ONE_RANK = 4.0  # a profile of one rank does not show how ranks on a host slow each other down
LESS_PER_DOUBLING = 1.0  # of compute, for each doubling of ranks beyond the profile's
MORE_PER_DOUBLING = 4.0  # the same: input, stragglers and shared memory make steps longer rather than shorter
ACCUMULATED = (
    6.0  # of compute where more batches add up their gradients, as one pair of runs took (benchmarks/notes.md)
)
ESTIMATED_COMPRESSION = 10.0  # of communication, where a method's compute time is counted and not measured


@dataclass(frozen=True)
class Doubt:
    """Factors, at least 1: compute may take `faster` times less or `slower` times more, communication likewise.

    `unlike` is by how much one rank's step may be shorter than predicted, as far as it was not measured itself.
    """

    faster: float
    slower: float
    wire_faster: float
    wire_slower: float
    unlike: float = 1.0
    warnings: tuple[str, ...] = ()


def expected(fitted: Calibration, base: Case) -> Doubt:
    """The errors of compute and of communication for one case, and the warnings that explain them."""
    warnings = guesses(fitted, base.network.cluster, base.speed)
    both, less, more = [fitted.error_percent], [0.0], [0.0]
    unlike = [fitted.error_percent if fitted.ranks > 1 else 0.0]  # one rank's step is as it was measured
    if base.batch != 1:
        shorter, longer = _batch(base)
        less.append(100 * (shorter - 1))
        unlike.append(less[-1])
        more.append(100 * (longer - 1))
        size, curve = round(base.batch * fitted.workload.batch_size), base.workload.curve
        if curve is None:
            warnings.append(
                f"batch size {size} was not measured ({fitted.workload.batch_size} was): which part of a step does not "
                "depend on it is assumed; measure it with hvdkit profile --batch-sizes"
            )
        elif size not in curve.sizes:
            how = "interpolated between" if curve.sizes[0] <= size <= curve.sizes[-1] else "extrapolated from the"
            warnings.append(f"batch size {size} was not measured: its time is {how} measured ones")
    if base.speed != 1:
        both.append(100 * (of_device(base.speed) - 1))
        unlike.append(both[-1])
        warnings.append(f"a device {base.speed:g} times as fast was not measured: its time is scaled")
    for change in base.workload.changes:
        less.append(100 * (change.shorter - 1))
        more.append(100 * (change.longer - 1))
        unlike.append(less[-1])
        warnings.append(change.told)
    if base.accumulate > 1:
        more.append(ACCUMULATED)
        warnings.append("accumulation was not measured: adding up gradients is taken to need no time")
    ranks = base.data_ranks
    doublings = math.log2(max(1.0, ranks / fitted.ranks))
    less.append(LESS_PER_DOUBLING * doublings)
    more.append(MORE_PER_DOUBLING * doublings)
    wire = 0.0
    if ranks > 1:
        if fitted.ranks == 1:
            both.append(ONE_RANK)
            known = "is not known" if fitted.on_cpu else "is taken from published runs"
            warnings.append(f"the profile is of one rank: how ranks on a host slow each other down {known}")
        if base.rules.overlaps and not fitted.overlap_shown:
            warnings.append("no overlap of communication was measured; the interval includes a step without any")
        wire, told = _wire(base)
        warnings += told
    shorter, longer = math.hypot(*both, *less), math.hypot(*both, *more)
    return Doubt(
        1 + shorter / 100,
        1 + longer / 100,
        1 + max(wire, shorter) / 100,
        1 + max(wire, longer) / 100,
        1 + math.hypot(*unlike) / 100,
        tuple(dict.fromkeys(warnings)),
    )


def guesses(fitted: Calibration, cluster: Cluster, speed: float = 1.0) -> list[str]:
    """What is taken for granted without any measurement: that the profile's device is the cluster's.

    A line for each, with what to do; where there is one, no change is called sure. `speed` is that of the cluster's
    device, relative to the profile's.
    """
    device = cluster.device
    if not device.relative_speed:
        return []
    if fitted.on_cpu and speed != 1:
        return [f"the profile is of CPUs, and {device.name}s are taken to be {speed:g} times as fast in every layer"]
    if fitted.on_cpu:
        return [
            f"the profile is of CPUs: this predicts them on {cluster.name}'s links, not {device.name}s; "
            "say how many times as fast those are (--set speed=30), or profile on one of them"
        ]
    if speed == 1 and fitted.processor and device.name.lower() not in fitted.processor.lower():
        return [
            f"the profile is of {fitted.processor}, {cluster.name} has {device.name}s: this predicts the former; "
            "say how many times as fast a device of the cluster is (--set speed=0.5), or profile on one of them"
        ]
    return []


def of_device(times: float) -> float:
    """The error of compute, as a factor, on a device that is so many times as fast."""
    return 1 + PER_DOUBLING / 100 * abs(math.log2(times))


def _batch(base: Case) -> tuple[float, float]:
    """The factors by which compute may be shorter and longer at a batch size that was not measured."""
    work, batch = base.workload, base.batch
    known = [size / work.batch_size for size in work.curve.sizes] if work.curve else [1.0]
    grown = 1 + PER_DOUBLING / 100 * min(abs(math.log2(batch / measured)) for measured in known)
    if work.curve:
        return grown, grown
    share = work.compute_factor(batch)
    factors = [fixed + (1 - fixed) * batch for fixed in FIXED_PARTS]
    return grown * max(1.0, share / min(factors)), grown * max(1.0, max(factors) / share)


def _wire(base: Case) -> tuple[float, list[str]]:
    """The error of communication in percent, and its warnings."""
    warnings: list[str] = []
    residuals = []
    measured = base.network.cluster.measured
    for phase, cost in zip(base.traffic.phases, base.costs, strict=True):
        residuals.append([cost.residual_percent])
        warnings += cost.warnings
        largest = float(phase.sizes.sum())
        known = [m.largest_bytes for m in measured if m.operation == phase.operation]
        if known and largest > 2 * max(known):
            residuals[-1].append(PER_DOUBLING * math.log2(largest / max(known)))
            warnings.append(f"{phase.operation}s of more than {max(known)} bytes were not measured")
    level = max((level for level, _ in base.network.levels), key=lambda level: level.varies_percent)
    if level.varies_percent:
        residuals.append([max(math.hypot(*residual) for residual in residuals), level.varies_percent])
        warnings.append(f"{level.name}'s rate varies by {level.varies_percent:g} % from run to run")
    if base.traffic.warning:
        warnings.append(base.traffic.warning)
    if not measured:
        name = base.network.cluster.name
        warnings.append(f"no collective has been measured on {name}: its links are assumed to reach their rates")
    if base.compression.method not in ("none", "fp16") and base.compression_s is None:
        residuals[-1].append(ESTIMATED_COMPRESSION)
        how = f": {SELECTION_TOLD}" if base.assumes_selection else ""
        warnings.append(f"the compute time of {base.compression.method} is estimated, not measured{how}")
    return max(math.hypot(*residual) for residual in residuals), warnings
