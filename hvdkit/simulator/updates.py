"""How long an update of a recipe takes, from the step of a profile: of several batches, with recomputed activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.recipe.schema import Recipe, flat
from hvdkit.simulator import divided
from hvdkit.simulator import predict as predicting
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.ladder import Step
from hvdkit.simulator.settings import Settings

# What a step of another recipe cannot be predicted from.
_SAME = ("precision", "model.context", "data.height", "data.width", "data.size")


def update(
    fitted: Calibration, profiled: Mapping[str, Any], cluster: Cluster, ranks: int, speed: float, recipe: Recipe
) -> Step | None:
    """An update of a recipe on so many ranks whose devices are `speed` times as fast as the profile's.

    `profiled` are the values of the profile's recipe, by dotted key. None where the profile does not say it: of another
    precision or size of samples. Batches that are accumulated take their compute;
    where gradients are sharded, each sends its own. With `recompute` each batch has another forward.
    """
    if any(flat(recipe).get(key) != profiled.get(key) for key in _SAME):
        return None
    if recipe.parallel.divides:
        way = divided.divided(fitted, profiled, recipe, cluster, ranks, speed)
        if way is None:
            return None
        mesh = way.step()
        return Step(*(1e3 * seconds for seconds in (mesh.seconds, *divided.interval(fitted, mesh))))
    base = fitted.case(cluster, ranks, Settings(batch_size=recipe.batch_size, sharding=recipe.sharding, speed=speed))
    (step,) = predicting.forecasts([predicting.ensemble(fitted, base)])
    each = step.seconds if recipe.sharding in ("gradients", "parameters") else step.alone - base.update_s
    again = recipe.recompute and not profiled.get("recompute")
    forward = base.work * float(base.parts.forward.sum()) if again else 0.0
    seconds = step.seconds + (recipe.accumulate - 1) * each + recipe.accumulate * forward
    grown = 1e3 * seconds / step.seconds
    return Step(1e3 * seconds, grown * step.low, grown * step.high)
