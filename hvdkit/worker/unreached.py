"""What a recipe asks for and does not get, because its run ends before it."""

from __future__ import annotations

from hvdkit.core.step_plan import StepPlan
from hvdkit.recipe.schema import Recipe

_FIRST = 0.05  # the largest share of the first weights in an average that needs no note
_FORGETS = 5  # times 1 / (1 - decay) updates leave a share of e^-5 of the first weights


def unreached(plan: StepPlan) -> list[str]:
    """A line for each thing in the recipe that is to happen, and does not within its updates."""
    recipe, schedule, total, rate = plan.recipe, plan.recipe.schedule, plan.total_steps, plan.rate
    spe = plan.steps_per_epoch
    ends = f"the run ends after {_count(total, 'step')} ({_count(round(total / spe, 2), 'epoch')})"
    late = [milestone for milestone in schedule.milestones if milestone * spe >= total]
    found = []
    if rate.warmup >= total:
        found.append(
            f"schedule.warmup_epochs: {schedule.warmup_epochs:g} are {_count(rate.warmup, 'step')}, and {ends}: "
            f"the learning rate rises to {rate(total - 1):.3g} and never reaches {rate.peak:.3g}"
        )
    elif late:
        found.append(f"schedule.milestones: {', '.join(f'{each:g}' for each in late)}: {ends}, before them")
    elif schedule.decay in ("cosine", "polynomial") and total < rate.total:
        found.append(
            f"steps: {ends}, and the schedule is for {_count(recipe.epochs, 'epoch')}: the learning rate is "
            f"{rate(total - 1):.3g} at the end, of {rate.peak:.3g}"
        )
    if recipe.accumulate > (batches := plan.samples // plan.global_batch):
        found.append(
            f"accumulate: {recipe.accumulate} batches make an update, and an epoch has {batches}, so each update "
            "is of fewer samples than its learning rate is scaled to"
        )
    saved, every = recipe.checkpoint, {"check_ranks": recipe.check_ranks}
    if saved and not 0 < saved.every_epochs <= plan.epochs and not 0 < saved.every_steps <= total:
        key, number = ("every_steps", _count(saved.every_steps, "step"))
        if not saved.every_steps:
            key, number = "every_epochs", _count(saved.every_epochs, "epoch")
        found.append(f"checkpoint.{key}: every {number}, and {ends}: the only checkpoint is that of its end")
    if getattr(recipe.compression, "warmup_epochs", 0) * spe >= total:
        found.append(f"compression.warmup_epochs: {ends}, before the ratio reaches its value")
    if recipe.sync:
        every["sync.every"] = recipe.sync.every
        if recipe.sync.start * spe >= total:
            found.append(f"sync.start: {recipe.sync.start:g}, and {ends}: no update is a local one")
    if recipe.elastic:
        every["elastic.commit_every"] = recipe.elastic.commit_every
    if recipe.log_every != Recipe.model_fields["log_every"].default:
        every["log_every"] = recipe.log_every
    found += [
        f"{key}: every {_count(number, 'step')}, and {ends}: it never happens"
        for key, number in every.items()
        if number > total
    ]
    average = recipe.average_weights
    if average and average.from_epoch and average.from_epoch * spe > total:
        found.append(f"average_weights.from_epoch: {average.from_epoch}, and {ends}: there is no average")
    elif average and average.decay and (left := average.decay ** (total - 1)) > _FIRST:
        advice = f"; give at most {1 - _FORGETS / total:.3g}" if total > 2 * _FORGETS else ""
        found.append(
            f"average_weights.decay: {average.decay:g}, and {ends}: {100 * left:.0f} % of the average are still "
            f"the weights after the first step{advice}"
        )
    if recipe.early_stopping and 1 + recipe.early_stopping.patience >= plan.epochs:
        found.append(
            f"early_stopping.patience: {_count(recipe.early_stopping.patience, 'epoch')} after the first one, and "
            f"{ends}: it never ends the run"
        )
    if recipe.warmup_steps >= total:
        found.append(
            f"warmup_steps: throughput leaves out the first {_count(recipe.warmup_steps, 'step')}, and {ends}: it "
            "is that of the last step alone"
        )
    return found


def _count(number: float, of: str) -> str:
    return f"{number:,g} {of}{'' if number == 1 else 's'}"
