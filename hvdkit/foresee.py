"""`hvdkit predict` and `hvdkit advise`: what is asked for, checked; the answer, written."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit import config
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic
from hvdkit.profiling import profile as profiles
from hvdkit.profiling.profile import Profile
from hvdkit.report import gantt
from hvdkit.report.foresee import advice_markdown
from hvdkit.simulator import advise as advising
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import settings as settings_
from hvdkit.simulator.advise import Advice, Money
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.predict import Prediction
from hvdkit.simulator.settings import Settings


@dataclass(frozen=True)
class Plan:
    """A question that can be answered."""

    profile: Profile
    cluster: Cluster
    ranks: list[int]
    settings: Settings


@dataclass(frozen=True)
class Request:
    """A question for advice: on `plan`'s one number of ranks; `apply` is the file for the recipe that follows it."""

    plan: Plan
    money: Money
    apply: Path | None


def plan(profile: Path, cluster: Path, ranks: Sequence[int], texts: Sequence[str], policy: str | None) -> Plan:
    """Read and check. Raises RequestError with file, key and what was expected."""
    what_if = settings_.read(texts, policy)
    links = settings_.applied(clusters.load(cluster), what_if)
    found = profiles.load(profile)
    for key, value in _numbers(found.model_dump(exclude={"settings"}), ()):
        # what no run can have; sums and squares of it would leave the range of numbers
        most = 1e15 if isinstance(value, int) else 1e9
        if value > most:
            raise RequestError(
                f"{profile}: {'.'.join(key)}: expected at most {most:g}, got {float(min(value, 10**300)):g}"
            )
    return Plan(found, links, predicting.checked(ranks, links), what_if)


def _numbers(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """All numbers in a document, each with the keys that lead to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, (*key, str(name)))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _numbers(inner, (*key, str(place)))
    elif isinstance(value, int | float):
        yield key, value


def predict(plan: Plan, folder: Path) -> Prediction:
    """Answer, and write `predict.json`, and picture and trace of the step at the most ranks, into the folder.

    Raises RunError where it cannot be written.
    """
    found = predicting.predict(plan.profile, plan.cluster, plan.ranks, plan.settings)
    write_atomic(folder / "predict.json", found.model_dump_json(indent=2) + "\n")
    most = max(plan.ranks)
    schedule = predicting.schedule(predicting.basis(plan.profile), plan.cluster, most, plan.settings)
    title = f"{plan.profile.model}, {most} ranks on {plan.cluster.name}: {1e3 * schedule.period:.1f} ms a step"
    gantt.picture(schedule, title, folder / "predict.png")
    gantt.trace(schedule, plan.profile, folder / "predict-trace.json")
    return found


def request(plan: Plan, price: float | None, images: int | None, epochs: int | None, apply: Path | None) -> Request:
    """Check what advice needs beside a plan. Raises RequestError for a price, or a file that is there already."""
    if price is not None and not 0 <= price < 1e9:
        raise RequestError(f"--price {price}: expected the price of a GPU for an hour, such as 2.5")
    if apply is not None and apply.exists():
        raise RequestError(f"--apply {apply}: is there already and is not overwritten; name another file")
    settings = plan.profile.settings
    known_epochs = settings.get("epochs")
    return Request(
        plan,
        Money(
            images=images or _images(settings),
            epochs=epochs or (known_epochs if isinstance(known_epochs, int) else None),
            price=plan.cluster.price_per_gpu_hour if price is None else price,
        ),
        apply,
    )


def advise(request: Request, folder: Path) -> tuple[Advice, str | None]:
    """Answer, and write `advise.json` and `advise.md`; with `apply` the recipe too, and what was applied.

    Raises RunError where something cannot be written, RequestError where nothing of the advice fits the recipe.
    """
    asked = request.plan
    found = advising.advise(asked.profile, asked.cluster, asked.ranks[0], asked.settings, request.money)
    write_atomic(folder / "advise.json", found.model_dump_json(indent=2) + "\n")
    write_atomic(folder / "advise.md", advice_markdown(found))
    if request.apply is None:
        return found, None
    what, text = applied(found, asked.profile.settings)
    write_atomic(request.apply, text)
    return found, what


def applied(advice: Advice, settings: dict[str, Any]) -> tuple[str, str]:
    """(what was applied, the recipe as YAML): the best suggestion that a recipe can say and that is a sure gain.

    Raises RequestError where there is none, or the profile has no whole recipe in it.
    """
    refused = ""
    for each in advice.suggestions:
        if each.recipe is None or not each.sure:
            continue
        try:
            recipe = config.revise(copy.deepcopy(settings) | each.recipe, "the profile's recipe")
        except RequestError as error:
            refused = refused or f" ({each.what}: {str(error).splitlines()[0]})"
            continue
        return each.what, config.dump(recipe)
    raise RequestError(f"--apply: expected a sure gain that a key of the recipe brings, found none{refused}")


def _images(settings: dict[str, Any]) -> int | None:
    """Training images an epoch, where the recipe's data tells them."""
    data = settings.get("data")
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("train_images"), int):
        return int(data["train_images"])
    return {"digits": 1437, "mnist5k": 4000, "cifar10": 50_000}.get(str(data.get("name")))
