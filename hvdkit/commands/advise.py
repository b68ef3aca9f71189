"""`hvdkit advise RECIPE`: profile a recipe, or take the profile of an earlier run, and answer the question of it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hvdkit import paths
from hvdkit.commands import predict
from hvdkit.commands import profile as profiling
from hvdkit.commands.fields import FRAMEWORKS_HELP, LAUNCHERS, OF_HOSTS, OF_RECIPES, SETTINGS, profile_file
from hvdkit.commands.loading import loaded
from hvdkit.commands.predict import AsksWhatIf, PredictPlan, Question
from hvdkit.commands.profile import ProfilePlan
from hvdkit.commands.request import Accepts, Argument, Option, say
from hvdkit.data.counts import KNOWN
from hvdkit.defaults import FRAMEWORK, LAUNCHER, PROFILED_RANKS, STALL_TIMEOUT_S, STEPS
from hvdkit.errors import LARGEST, Faults, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe import parallel, registry, schema, yaml_files
from hvdkit.report import csv_files
from hvdkit.report.predict import advice_lines, advice_markdown
from hvdkit.results.profile import Profile
from hvdkit.simulator import advise as advising
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.advise import Advice
from hvdkit.simulator.money import Money
from hvdkit.worker.profile import LEAST_STEPS

_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
CLUSTER = "cluster.yaml"


def _subject(name: str, given: Any) -> Any:
    return OF_RECIPES.convert(name, given) if isinstance(given, Mapping) else profile_file(name, given)


class AdviseRequest(AsksWhatIf):
    """Rank what would make training faster or cheaper, from a profile, or from a recipe, which is profiled first.

    `overrides`, `framework` to `stall_timeout` and `resume` are for a recipe; None stands for what `profile` takes.
    `images`, or `tokens` of a text, are those of an epoch. `price` and `budget` are in the cluster's currency;
    `deadline` is a time such as `36h`, `friday` or `2026-11-27`.
    `spot_interruption` is how often a host is taken away in an hour. With `apply`, a file, the recipe with the largest
    certain gain is written there.
    """

    subject: Annotated[
        Path | dict[str, Any],
        Accepts("AnyRecipe | Profile", "a recipe or a profile", _subject),
        Argument(
            "a profile, or a recipe (file or name) to profile first",
            metavar="PROFILE.json|RECIPE",
        ),
    ]
    overrides: Annotated[
        list[str] | None,
        SETTINGS,
        Argument(
            "changes to the recipe, such as epochs=2",
            metavar="[key=value]...",
        ),
    ] = None
    cluster: Annotated[
        Path | None,
        Option(
            "a file, or one of hvdkit's",
            metavar="CLUSTER.yaml",
            shown="the links of the profile",
        ),
    ] = None
    ranks: Annotated[int | None, Option("number of ranks", ("-n",), shown="the profile's")] = None
    price: Annotated[float | None, Option("price of a GPU hour", shown="the cluster file's"), Field(ge=0, le=1e9)] = (
        None
    )
    images: Annotated[
        int | None,
        Option("images in an epoch", ("--epoch-images",), old=("--images",), shown="the recipe's data"),
        Field(ge=1),
    ] = None
    tokens: Annotated[
        int | None,
        Option("a text's tokens in an epoch", ("--epoch-tokens",), old=("--tokens",), shown="the recipe's data"),
        Field(ge=1),
    ] = None
    epochs: Annotated[int | None, Option("epochs of training", shown="the recipe's"), Field(ge=1)] = None
    budget: Annotated[
        float | None,
        Option("find the fastest way to train for this much, in the cluster file's currency"),
        Field(gt=0, le=1e15),
    ] = None
    deadline: Annotated[
        str | None, Option("find the cheapest way to train until then: 36h, 2d, friday, 2026-11-27")
    ] = None
    spot_interruption: Annotated[
        float | None, Option("how often a host is taken away in an hour, such as 0.05"), Field(ge=0, le=60)
    ] = None
    apply: Annotated[
        Path | None,
        Option(
            "write the recipe with the largest certain gain", ("--new-recipe",), old=("--apply",), metavar="NEW.yaml"
        ),
    ] = None
    framework: Annotated[
        str | None,
        Option(
            f"framework to profile a recipe with: {FRAMEWORKS_HELP.replace('pytorch', 'pytorch (default)')}",
        ),
    ] = None
    np: Annotated[int | None, Option("ranks to profile a recipe with", ("-np", "--np"), shown="2")] = None
    hosts: Annotated[
        str | None, OF_HOSTS, Option("hosts to profile a recipe on", ("-H", "--hosts"), shown="this machine")
    ] = None
    steps: Annotated[
        int | None,
        Option("steps to measure of a recipe", shown="20"),
        Field(ge=LEAST_STEPS, le=profiling.MOST_STEPS),
    ] = None
    launcher: Annotated[
        str | None,
        Option(f"launcher to profile a recipe with: {LAUNCHERS}"),
    ] = None
    stall_timeout: Annotated[float | None, Option("seconds after which a rank that hangs ends the run", shown="60")] = (
        None
    )
    resume: Annotated[bool, Option("use the profile of the recipe in --out")] = False


def run(request: AdviseRequest) -> Advice:
    """Answer, and write advise.json, .csv and .md. Raises RequestError, what profiling raises, and RunError where they
    cannot be written."""
    check(request.apply)
    deadline_s = seconds_until(request.deadline, datetime.now())
    of_profile = isinstance(request.subject, Path) and request.subject.suffix == ".json"
    subject = _of_profile(request) if of_profile else _of_recipe(request)
    if isinstance(subject, PredictPlan):
        name, settings = subject.profile.recipe, subject.profile.settings
    else:
        name, settings = subject[0].given.name, subject[0].given.model_dump()
    files = [path for path in (request.subject, request.cluster) if isinstance(path, Path)]
    target = request.out or paths.default_out(name, "advise")
    with paths.claimed(target, request.overwrite, request.resume, files) as folder:
        plan = subject if isinstance(subject, PredictPlan) else profiled(*subject, folder)
        costs = money(plan, request, deadline_s)
        advice = advising.advise(plan.profile, plan.cluster, plan.ranks[0], plan.settings, costs)
        advice.written(folder)
        csv_files.save(folder / "advise.csv", advice.records())
        write_atomic(folder / "advise.md", advice_markdown(advice))
        if request.apply is not None:
            say([f"{request.apply}: the recipe with {apply(advice, settings, request.apply)}"])
        return advice


def lines(request: AdviseRequest, result: Advice) -> Iterator[str]:
    """What would help most."""
    yield from advice_lines(result)
    yield f"written to {result.folder / 'advise.json'} and advise.md"


def _of_profile(request: AdviseRequest) -> PredictPlan:
    """Raises RequestError, also if one of the options of a recipe is given."""
    assert isinstance(request.subject, Path)
    names = ("framework", "np", "hosts", "steps", "launcher", "stall_timeout", "overrides", "resume")
    given, ranks = [name for name in names if getattr(request, name) not in (None, False, [])], request.ranks
    if ranks is None and given == ["np"]:
        given, ranks = [], request.np  # there is nothing to profile, so it can only mean the number of ranks
    question = _question(request, ranks)
    if given:
        options = [request.declared()[name][1].option(name) for name in given]
        raise RequestError(
            f"{', '.join(options)}: expected a recipe with it, got the profile {request.subject}, which is measured"
        )
    return question.of(predict.read(request.subject))


def _of_recipe(request: AdviseRequest) -> tuple[ProfilePlan, Question]:
    """What is to be measured, and then asked. Raises RequestError with all its faults."""
    question = _question(request, request.ranks)
    if request.resume and request.out is None:
        raise RequestError("--resume: expected --out with the folder of an earlier hvdkit advise")
    recipe = loaded(request, recipe=request.subject)
    placement = Placement(
        PROFILED_RANKS if request.np is None else request.np,
        request.hosts,
        request.launcher or LAUNCHER,
        STALL_TIMEOUT_S if request.stall_timeout is None else request.stall_timeout,
    )
    faults = Faults()
    if question.cluster is None and placement.np == 1:
        faults.append(f"--cluster: {predict.NO_LINKS}; or -np 2 or more, whose own links are taken")
    with faults.collected():
        parallel.check_whole(recipe.parallel, "hvdkit advise")
    with faults.collected():
        measuring = profiling.plan(recipe, request.framework or FRAMEWORK, placement, request.steps or STEPS)
    faults.report()
    return measuring, question


def _question(request: AdviseRequest, ranks: int | None) -> Question:
    several = [] if ranks is None else [ranks]
    return predict.question(request.cluster, several, predict.what_ifs(request), request.policy)


def profiled(measuring: ProfilePlan, question: Question, folder: Path) -> PredictPlan:
    """The question of a profile that is measured into `folder`, or is there already.

    Where no cluster was named, the links that were timed are written to `cluster.yaml`. Raises as `profile.measured`
    does, and RequestError where the profile that is there is of another request.
    """
    path = folder / profiling.FILE
    if path.exists():
        profile = predict.read(path)
        _check_same(profile, measuring, path)
        say([f"{path} is there and taken"])
    else:
        plan = measuring.plan
        say(measuring.left_out)
        say([f"profiling {plan.recipe.name} under {plan.framework}, {plan.np} rank(s)"])
        profile = profiling.measured(measuring, folder)
    answered = question.of(profile)
    if question.cluster is None:
        clusters.save(answered.cluster, folder / CLUSTER)
        say([f"no --cluster: the links are those that the profile timed, kept in {folder / CLUSTER}"])
    return answered


def _check_same(profile: Profile, wanted: ProfilePlan, path: Path) -> None:
    plan = wanted.plan
    here = {"framework": plan.framework, "ranks": plan.np, "hosts": len(plan.placement.hosts)}
    there = {"framework": profile.framework, "ranks": profile.np, "hosts": profile.hosts}
    different = [f"{there[key]} instead of {here[key]} as {key}" for key in here if there[key] != here[key]]
    # A profile keeps no checkpoints, whatever its recipe says.
    if profile.settings | {"checkpoint": None} != wanted.given.model_dump(mode="json") | {"checkpoint": None}:
        different.append("another recipe")
    if different:
        raise RequestError(
            f"--resume: {path} has {', '.join(different)}; give --overwrite to measure again, or another --out"
        )


def check(apply: Path | None) -> None:
    """Raise RequestError for a file that is there already, or cannot be written."""
    if apply is None:
        return
    if os.path.lexists(apply):
        raise RequestError(f"--new-recipe {apply}: is there already and is not overwritten; name another file")
    if not os.access(apply.parent, os.W_OK | os.X_OK):
        raise RequestError(f"--new-recipe {apply}: {apply.parent} is no folder that can be written; name another file")


def seconds_until(deadline: str | None, now: datetime) -> float | None:
    """Seconds from `now` to a deadline such as 36h, 2d, friday (its end) or 2026-11-27T18:00; None for none.

    Raises RequestError for another text, and for a time that has passed.
    """
    if deadline is None:
        return None
    text = deadline.strip().lower()
    days = [number for number, name in enumerate(_WEEKDAYS) if len(text) >= 3 and name.startswith(text)]
    try:
        if match := re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(m|h|d)", text):
            seconds = float(match[1]) * {"m": 60, "h": 3600, "d": 86400}[match[2]]
        else:
            at = now + timedelta((days[0] - now.weekday()) % 7) if days else datetime.fromisoformat(text.upper())
            end_of_day = bool(days) or len(text) <= 10
            at = datetime.combine(at.date(), time.max) if end_of_day else at.replace(tzinfo=None)
            seconds = (at - now).total_seconds()
    except ValueError:
        expected = "expected a time such as 36h, 2d, friday, 2026-11-27 or 2026-11-27T18:00"
        raise RequestError(f"--deadline {deadline!a}: {expected}") from None
    if seconds <= 0:
        raise RequestError(f"--deadline {deadline}: expected a time to come")
    return seconds


def money(plan: PredictPlan, request: AdviseRequest, deadline_s: float | None = None) -> Money:
    """What training costs, and may cost; what is not given is taken from the profile, its recipe and the cluster.

    Raises RequestError if `images` or `tokens` of an epoch are given where the profile's samples are others.
    """
    profile, cluster = plan.profile, plan.cluster
    settings, given = profile.settings, {"tokens": request.tokens, "images": request.images}
    wrong = [name for name, value in given.items() if value and (name == "tokens") != (profile.unit == "tokens")]
    if wrong:
        other = next(name for name in given if name not in wrong)
        raise RequestError(
            f"--epoch-{wrong[0]}: the speeds of this profile count {profile.unit}; expected --epoch-{other}"
        )
    units = request.images or request.tokens
    if units and units < profile.units_per_sample:
        raise RequestError(f"--epoch-tokens {units}: expected at least one window of {profile.units_per_sample} tokens")
    return Money(
        samples=units // profile.units_per_sample if units else profile.train_samples or samples_of(settings),
        unit=profile.unit,
        units_per_sample=profile.units_per_sample,
        epochs=request.epochs or _count(settings.get("epochs")),
        price=cluster.price_per_gpu_hour if request.price is None else request.price,
        currency=cluster.currency,
        source=cluster.price_source if request.price is None else "--price",
        budget=request.budget,
        deadline_s=deadline_s,
        interruptions=request.spot_interruption or 0.0,
        ranks_per_host=cluster.ranks_per_host,
    )


def apply(advice: Advice, settings: dict[str, Any], path: Path) -> str:
    """Write the recipe `settings` with the best suggestion that a recipe can express and that is a sure gain.

    Returns the suggestion. Raises RunError where there is none, or where the settings are no complete recipe.
    """
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
    raise RunError(f"--new-recipe: nothing written, as no key of the recipe brings a sure gain{refused}")


def samples_of(settings: dict[str, Any]) -> int | None:
    """Training samples of an epoch, where they follow from the recipe's data."""
    data = settings.get("data")
    if not isinstance(data, dict):
        return None
    known = KNOWN.get(str(data.get("name")))
    return known.train if known else _count(data.get("train_images")) or _count(data.get("train_windows"))


def _count(value: Any) -> int | None:
    """A count in a profile's recipe, which nobody has checked; None where the value is none."""
    return value if isinstance(value, int) and 1 <= value <= LARGEST else None
