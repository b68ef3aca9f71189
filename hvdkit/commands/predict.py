"""`hvdkit predict` and `hvdkit advise`: check a request, answer it, write the answer."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit.data.counts import KNOWN
from hvdkit.errors import LARGEST, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.report import csv_files, gantt
from hvdkit.results import profile as profiles
from hvdkit.results.profile import Profile
from hvdkit.simulator import calibration, refusals
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import settings as settings_
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.predict import Prediction
from hvdkit.simulator.settings import Settings

if TYPE_CHECKING:  # advice is loaded only for `hvdkit advise`
    from hvdkit.simulator.advise import Advice
    from hvdkit.simulator.money import Money
    from hvdkit.simulator.sweep import Sweep

_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
NO_LINKS = "expected a cluster file, or the name of one of hvdkit's"


@dataclass(frozen=True)
class Plan:
    """A question that can be answered."""

    profile: Profile
    cluster: Cluster
    ranks: list[int]
    settings: Settings


@dataclass(frozen=True)
class Question:
    """What can be checked before there is a profile. Without a `cluster` the links are those that the profile timed;
    without `ranks` their number is the profile's.
    """

    cluster: Cluster | None
    ranks: list[int]
    settings: Settings

    def of(self, profile: Profile) -> Plan:
        """The question of a profile. Raises RequestError where that lacks something, or what is asked cannot be."""
        cluster = self.cluster or calibration.own_network(profile)
        if cluster is None:
            raise RequestError(f"--cluster: {NO_LINKS}, as the profile timed none over {profile.np} rank(s)")
        links = settings_.applied(cluster, self.settings)
        ranks = predicting.checked(self.ranks or [profile.np], links)
        refusals.check(calibration.calibrate(profile), links, ranks, self.settings)
        return Plan(profile, links, ranks, self.settings)


def question(cluster: Path | None, ranks: Sequence[int], texts: Sequence[str], policy: str | None) -> Question:
    """Read and check. Raises RequestError with file, key and what was expected."""
    what_if = settings_.read(texts, policy)
    links = clusters.load(cluster) if cluster else None
    if links is not None:
        settings_.applied(links, what_if)
    return Question(links, predicting.checked(ranks, links), what_if)


def plan(profile: Path, cluster: Path | None, ranks: Sequence[int], texts: Sequence[str], policy: str | None) -> Plan:
    """Read and check. Raises RequestError with file, key and what was expected."""
    return question(cluster, ranks, texts, policy).of(read(profile))


def read(profile: Path) -> Profile:
    """A profile whose numbers are in range. Raises RequestError with file, key and what was expected."""
    content = profiles.load(profile)
    for key, value in _numbers(content.model_dump(exclude={"settings"})):
        # no run has such a value; sums and squares of it would be infinite
        most = 1e15 if isinstance(value, int) else 1e9
        if value > most:
            raise RequestError(f"{profile}: {key[1:]}: expected at most {most:g}, got {float(min(value, 10**300)):g}")
    return content


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in a document, each with the keys that lead to it, a dot before each."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{key}.{name}")
    elif isinstance(value, int | float):
        yield key, value


def predict(plan: Plan, folder: Path) -> Prediction:
    """Answer, and write `predict.json`, and picture and trace of the step at the most ranks, into the folder.

    Raises RunError where it cannot be written.
    """
    prediction = predicting.predict(plan.profile, plan.cluster, plan.ranks, plan.settings)
    write_atomic(folder / "predict.json", prediction.model_dump_json(indent=2) + "\n")
    csv_files.save(folder / "predict.csv", csv_files.prediction(prediction))
    most = max(plan.ranks)
    schedule = predicting.schedule(calibration.calibrate(plan.profile), plan.cluster, most, plan.settings)
    title = f"{plan.profile.model}, {most} ranks on {plan.cluster.name}: {1e3 * schedule.period:.1f} ms per step"
    gantt.picture(schedule, title, folder / "predict.png")
    gantt.trace(schedule, plan.profile, folder / "predict-trace.json")
    return prediction


def sweep(
    profile: Path,
    cluster: Path,
    ranks: Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    texts: Sequence[str],
    policy: str | None,
) -> Callable[[Path], Sweep]:
    """Check a grid of what-ifs; returns what predicts it and writes sweep.json, .csv and .png into a folder.

    Raises RequestError with file, key and what was expected; what is returned raises RunError if it cannot write.
    """
    from hvdkit.simulator import sweep as sweeping

    profiled, links = read(profile), clusters.load(cluster)
    whatifs = sweeping.checked(grid, ranks, texts, policy, links)
    calibration.calibrate(profiled)

    def answer(folder: Path) -> Sweep:
        from hvdkit.report import sweep as report

        swept = sweeping.sweep(profiled, links, whatifs)
        write_atomic(folder / "sweep.json", swept.model_dump_json(indent=2) + "\n")
        csv_files.save(folder / "sweep.csv", report.rows(swept))
        report.picture(swept, folder / "sweep.png")
        return swept

    return answer


def check(
    price: float | None, apply: Path | None, budget: float | None = None, interruptions: float | None = None
) -> None:
    """Check what advice needs beside a question. Raises RequestError for a number, or a file that is there already."""
    if price is not None and not 0 <= price < 1e9:
        raise RequestError(f"--price {price}: expected the price of a GPU for an hour, such as 2.5")
    if budget is not None and not 0 < budget < 1e15:
        raise RequestError(f"--budget {budget:g}: expected what the training may cost, such as 500")
    if interruptions is not None and not 0 <= interruptions <= 60:
        raise RequestError(f"--spot-interruption {interruptions:g}: expected how often a host is lost in an hour: 0.05")
    if apply is None:
        return
    if os.path.lexists(apply):
        raise RequestError(f"--apply {apply}: is there already and is not overwritten; name another file")
    if not os.access(apply.parent, os.W_OK | os.X_OK):
        raise RequestError(f"--apply {apply}: {apply.parent} is no folder that can be written; name another file")


def seconds_until(deadline: str | None, now: datetime) -> float | None:
    """Seconds from `now` to a deadline such as 36h, 2d, friday (its end) or 2026-11-27T18:00; None for none.

    Raises RequestError for another text, and for a time that has passed.
    """
    if deadline is None:
        return None
    text = deadline.strip().lower()
    if match := re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(m|h|d)", text):
        seconds = float(match[1]) * {"m": 60, "h": 3600, "d": 86400}[match[2]]
    else:
        days = [name for name in _WEEKDAYS if len(text) >= 3 and name.startswith(text)]
        try:
            if days:
                end = now + timedelta((_WEEKDAYS.index(days[0]) - now.weekday()) % 7)
                at = datetime.combine(end.date(), time.max)
            else:
                at = datetime.fromisoformat(text.upper())
                at = datetime.combine(at.date(), time.max) if len(text) <= 10 else at.replace(tzinfo=None)
        except ValueError:
            expected = "expected a time such as 36h, 2d, friday, 2026-11-27 or 2026-11-27T18:00"
            raise RequestError(f"--deadline {deadline!a}: {expected}") from None
        seconds = (at - now).total_seconds()
    if seconds <= 0:
        raise RequestError(f"--deadline {deadline}: expected a time to come")
    return seconds


def money(
    plan: Plan,
    price: float | None,
    images: int | None,
    epochs: int | None,
    budget: float | None = None,
    deadline_s: float | None = None,
    interruptions: float | None = None,
    tokens: int | None = None,
) -> Money:
    """What training costs, and may cost; what is not given is taken from the profile, its recipe and the cluster.

    Raises RequestError if `images` or `tokens` of an epoch are given where the profile's samples are others.
    """
    from hvdkit.simulator.money import Money

    profile, cluster = plan.profile, plan.cluster
    settings, given = profile.settings, {"tokens": tokens, "images": images}
    wrong = [name for name, value in given.items() if value and (name == "tokens") != (profile.unit == "tokens")]
    if wrong:
        other = next(name for name in given if name not in wrong)
        raise RequestError(f"--{wrong[0]}: the speeds of this profile count {profile.unit}; expected --{other}")
    units = images or tokens
    if units and units < profile.units_per_sample:
        raise RequestError(f"--tokens {units}: expected at least one window of {profile.units_per_sample} tokens")
    return Money(
        samples=units // profile.units_per_sample if units else profile.train_samples or _samples(settings),
        unit=profile.unit,
        units_per_sample=profile.units_per_sample,
        epochs=epochs or _count(settings.get("epochs")),
        price=cluster.price_per_gpu_hour if price is None else price,
        currency=cluster.currency,
        source=cluster.price_source if price is None else "--price",
        budget=budget,
        deadline_s=deadline_s,
        interruptions=interruptions or 0.0,
        ranks_per_host=cluster.ranks_per_host,
    )


def advise(plan: Plan, money: Money, folder: Path) -> Advice:
    """Answer for the plan's first number of ranks, and write `advise.json` and `advise.md`.

    Raises RunError where they cannot be written.
    """
    from hvdkit.report.predict import advice_markdown
    from hvdkit.simulator import advise as advising

    advice = advising.advise(plan.profile, plan.cluster, plan.ranks[0], plan.settings, money)
    write_atomic(folder / "advise.json", advice.model_dump_json(indent=2) + "\n")
    csv_files.save(folder / "advise.csv", csv_files.advice(advice))
    write_atomic(folder / "advise.md", advice_markdown(advice))
    return advice


def apply(advice: Advice, settings: dict[str, Any], path: Path) -> str:
    """Write the recipe `settings` with the best suggestion that a recipe can express and that is a sure gain.

    Returns the suggestion. Raises RunError where there is none, or where the settings are no complete recipe.
    """
    from hvdkit import paths
    from hvdkit.recipe import registry, schema, yaml_files

    refused = ""
    for suggestion in advice.suggestions:
        if suggestion.recipe is None or not suggestion.sure:
            continue
        try:
            recipe = schema.revise(copy.deepcopy(settings) | suggestion.recipe, "the profile's recipe")
        except RequestError as error:
            refused = refused or f" ({suggestion.what}: {str(error).splitlines()[0]})"
            continue
        write_atomic(path, yaml_files.schema_line(paths.recipes() / registry.SCHEMA) + schema.dump(recipe))
        return suggestion.what
    raise RunError(f"--apply: nothing written, as no key of the recipe brings a sure gain{refused}")


def _samples(settings: dict[str, Any]) -> int | None:
    """Training samples of an epoch, where they follow from the recipe's data."""
    data = settings.get("data")
    if not isinstance(data, dict):
        return None
    known = KNOWN.get(str(data.get("name")))
    return known.train if known else _count(data.get("train_images")) or _count(data.get("train_windows"))


def _count(value: Any) -> int | None:
    """A count in a profile's recipe, which nobody has checked; None where the value is none."""
    return value if isinstance(value, int) and 1 <= value <= LARGEST else None
