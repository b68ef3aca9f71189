"""How long an update of a recipe takes, from the step of a profile: of several batches, and what `what_ifs` knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.recipe.schema import Recipe, flat
from hvdkit.simulator import divided, memory, what_ifs
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.forecast import forecasts
from hvdkit.simulator.ladder import PredictedStep
from hvdkit.simulator.settings import Settings

_SAME = ("precision", "model.context", "data.height", "data.width", "data.size")  # of a divided model


def update(
    fitted: Calibration, profiled: Mapping[str, Any], cluster: Cluster, ranks: int, speed: float, recipe: Recipe
) -> PredictedStep | None:
    """An update of a recipe on so many ranks whose devices are `speed` times as fast as the profile's.

    `profiled` are the values of the profile's recipe, by dotted key. None where the profile does not say it: of samples
    of which it has no size, and of a divided model in another precision or with samples of another size. Batches that
    are accumulated take their compute; where gradients are sharded, each sends its own.
    """
    shape, own = memory.sample_shape(recipe), fitted.workload
    size = None if shape == own.shape else shape and shape[0]
    precision = None if recipe.precision == own.precision else recipe.precision
    if recipe.parallel.divides:
        if any(flat(recipe).get(key) != profiled.get(key) for key in _SAME):
            return None
        way = divided.divided(fitted, profiled, recipe, cluster, ranks, speed)
        if way is None:
            return None
        mesh = way.step()
        return PredictedStep(*(1e3 * seconds for seconds in (mesh.seconds, *divided.interval(fitted, mesh))))
    if precision == "fp64" or (shape is None and own.shape) or (size and shape and len({*shape[:2]}) > 1 < len(shape)):
        return None
    key = "sequence_length" if own.unit == "tokens" else "image_size"
    settings = Settings.model_validate(
        {"batch_size": recipe.batch_size, "sharding": recipe.sharding, "speed": speed, "precision": precision}
        | {"recompute": recipe.recompute or None, key: size}
    )
    if what_ifs.refusal(own, settings, cluster.device):
        return None
    base = fitted.case(cluster, ranks, settings)
    (step,) = forecasts(fitted, [base])
    each = step.seconds if recipe.sharding in ("gradients", "parameters") else step.alone - base.update_s
    seconds = step.seconds + (recipe.accumulate - 1) * each
    grown = 1e3 * seconds / step.seconds
    return PredictedStep(1e3 * seconds, grown * step.low, grown * step.high)
