"""What a prediction takes for granted without any measurement: that the profile's device is the cluster's.

Where there is such a guess, it comes first, and no change is called sure.
"""

from __future__ import annotations

from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster


def guesses(fitted: Calibration, cluster: Cluster, speed: float = 1.0) -> list[str]:
    """A line for each, with what to do. `speed` is that of the cluster's device, relative to the profile's."""
    device, faster = cluster.device, f"{speed:g} times as fast"
    if fitted.on_cpu and device.relative_speed:
        if speed != 1:
            return [f"the profile is of CPUs, and {device.name}s are taken to be {faster} in every layer"]
        return [
            f"the profile is of CPUs: this predicts them on {cluster.name}'s links, not {device.name}s; "
            "say how many times as fast those are (--set speed=30), or profile on one of them"
        ]
    named = device.relative_speed and not fitted.on_cpu and fitted.processor
    if named and device.name.lower() not in fitted.processor.lower() and speed == 1:
        return [
            f"the profile is of {fitted.processor}, {cluster.name} has {device.name}s: this predicts the former; "
            "say how many times as fast a device of the cluster is (--set speed=0.5), or profile on one of them"
        ]
    return []
