"""What a recipe asks for and does not get, because its run ends before it."""

from __future__ import annotations

from functools import reduce

from hvdkit.core.step_plan import StepPlan
from hvdkit.recipe.schema import Recipe


def unreached(plan: StepPlan) -> list[str]:
    """A line for each key of the recipe that has no effect, or not all of it, within its updates."""
    recipe, schedule, total, spe = plan.recipe, plan.recipe.schedule, plan.total_steps, plan.steps_per_epoch
    # The steps that a run needs for each key's effect.
    needs = {
        "schedule.warmup_epochs": plan.rate.warmup + 1,
        "compression.warmup_epochs": getattr(recipe.compression, "warmup_epochs", 0) * spe + 1,
        "check_ranks": recipe.check_ranks,
        "warmup_steps": recipe.warmup_steps + 1,
    }
    if schedule.milestones:
        needs["schedule.milestones"] = max(schedule.milestones) * spe + 1
    if schedule.decay in ("cosine", "polynomial"):
        needs["schedule.decay"] = plan.rate.total
    if saved := recipe.checkpoint:
        every = [("epochs", (saved.every_epochs - 1) * spe + 1), ("steps", saved.every_steps)]
        key, needed = min((pair for pair in every if pair[1] > 0), key=lambda pair: pair[1], default=("epochs", 0))
        needs[f"checkpoint.every_{key}"] = needed
    if recipe.sync:
        needs |= {"sync.every": recipe.sync.every, "sync.start": recipe.sync.start * spe + 1}
    if recipe.elastic:
        needs["elastic.commit_every"] = recipe.elastic.commit_every
    if recipe.log_every != Recipe.model_fields["log_every"].default:
        needs["log_every"] = recipe.log_every
    if recipe.average_weights and recipe.average_weights.from_epoch:
        needs["average_weights.from_epoch"] = recipe.average_weights.from_epoch * spe
    if recipe.early_stopping:
        needs["early_stopping.patience"] = (recipe.early_stopping.patience + 1) * spe + 1
    lines = [
        f"{key}={reduce(getattr, key.split('.'), recipe)}: the run ends after {total:,} steps ({total / spe:.3g} "
        "epochs), too early for it"
        for key, steps in needs.items()
        if steps > total
    ]
    if recipe.accumulate > (batches := plan.samples // plan.global_batch):
        lines.append(f"accumulate={recipe.accumulate}: an epoch has {batches} batches, so each update is of fewer")
    return lines
