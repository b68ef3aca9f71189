"""`hvdkit predict`: the step of a profile at other numbers of ranks, on other networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hvdkit import paths
from hvdkit.commands.fields import SETTINGS, WritesFolder, profile_file
from hvdkit.commands.request import Accepts, Argument, Option
from hvdkit.errors import RequestError
from hvdkit.report import csv_files, gantt
from hvdkit.report.predict import prediction_lines
from hvdkit.results import profile as profiles
from hvdkit.results.profile import Profile
from hvdkit.simulator import calibration, refusals
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import settings as settings_
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.policies import POLICIES
from hvdkit.simulator.predict import Prediction
from hvdkit.simulator.settings import Settings

INSTEAD = "sweep"  # the command that `hvdkit predict` is with --sweep
NO_LINKS = "expected a cluster file, or the name of one of hvdkit's"


ProfileFile = Annotated[
    Path,
    Accepts("PathLike | Profile", "a profile, or its file", profile_file),
    Argument("the profile.json of `hvdkit profile`", metavar="PROFILE.json"),
]
ClusterFile = Annotated[
    Path,
    Option(
        "a cluster file, or the name of one of hvdkit's",
        ("--cluster",),
        metavar="CLUSTER.yaml",
    ),
]
_KEYS = ("accumulate", "recompute", "precision", "image_size", "sequence_length")  # those of `--set`, as options


class AsksWhatIf(WritesFolder):
    """A command that predicts from a profile what would be with other settings."""

    policy: Annotated[str | None, Option(f"when gradients are sent: {', '.join(POLICIES)}")] = None
    accumulate: Annotated[
        int | None, Option("what if: times as many batches for an update as in the profile"), Field(ge=1, le=2**20)
    ] = None
    recompute: Annotated[bool, Option("what if: blocks compute their activations again in backward")] = False
    precision: Annotated[Literal["fp32", "fp16", "bf16"] | None, Option("what if: in another precision")] = None
    image_size: Annotated[int | None, Option("what if: images of so many pixels a side"), Field(ge=8, le=8192)] = None
    sequence_length: Annotated[int | None, Option("what if: windows of so many tokens"), Field(ge=1, le=2**20)] = None
    settings: Annotated[
        list[str] | None, SETTINGS, Option("a what-if, such as batch_size=64", ("--set",), metavar="KEY=VALUE")
    ] = None


class PredictRequest(AsksWhatIf):
    """Predict step time, images/s and what bounds them, at any number of ranks, from a profile and a cluster file.

    `cluster` is a file, or the name of one of hvdkit's; `settings` is a what-if, such as `{"batch_size": 64}`.
    """

    profile: ProfileFile
    cluster: ClusterFile
    ranks: Annotated[
        list[int],
        Option(
            "number of ranks; may be repeated",
            ("-n", "-np", "--np"),
            shown="--sweep n=…",
            missing="expected the number of ranks, such as -n 8, or --sweep n=8,16",
        ),
    ]


def run(request: PredictRequest) -> Prediction:
    """Predict, and draw the step at the most ranks. Raises RequestError with file, key and what was expected; RunError
    where nothing can be written."""
    asked = question(request.cluster, request.ranks, what_ifs(request), request.policy)
    plan = asked.of(read(request.profile), may_divide=True)
    target = request.out or paths.default_out(plan.profile.recipe, "predict")
    with paths.claimed(target, request.overwrite, inputs=[request.profile, request.cluster]) as folder:
        prediction = predicting.predict(plan.profile, plan.cluster, plan.ranks, plan.settings)
        prediction.written(folder)
        csv_files.save(folder / "predict.csv", prediction.records())
        if plan.settings.parallel is not None:
            return prediction
        most = max(plan.ranks)
        schedule = predicting.schedule(calibration.calibrate(plan.profile), plan.cluster, most, plan.settings)
        title = f"{plan.profile.model}, {most} ranks on {plan.cluster.name}: one of the simulated steps"
        gantt.picture(schedule, title, folder / "predict.png")
        gantt.trace(schedule, plan.profile, folder / "predict-trace.json")
        return prediction


def lines(request: PredictRequest, result: Prediction) -> Iterator[str]:
    """What was predicted at each number of ranks."""
    yield from prediction_lines(result)
    drawn = "" if any(point.memory_by_stage_mib for point in result.points) else ", predict.png and predict-trace.json"
    yield f"written to {result.folder / 'predict.json'}{drawn}"


@dataclass(frozen=True)
class PredictPlan:
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

    def of(self, profile: Profile, may_divide: bool = False) -> PredictPlan:
        """The question of a profile, of ranks that divide the model too if they `may_divide` it.

        Raises RequestError where the profile lacks something, or what is asked cannot be.
        """
        cluster = self.cluster or calibration.own_network(profile)
        if cluster is None:
            raise RequestError(f"--cluster: {NO_LINKS}, as the profile timed none over {profile.np} rank(s)")
        links = settings_.applied(cluster, self.settings)
        ranks = predicting.checked(self.ranks or [profile.np], links)
        if not (may_divide and self.settings.parallel):
            refusals.check(calibration.calibrate(profile), links, ranks, self.settings)
        return PredictPlan(profile, links, ranks, self.settings)


def what_ifs(request: AsksWhatIf) -> list[str]:
    """What a request asks for as `--set` takes it, its options too. Raises RequestError for what it says twice."""
    values = request.model_dump(include={"settings", *_KEYS})
    texts, given = values.pop("settings") or [], {key: value for key, value in values.items() if value}
    for key in given:
        if any(text.partition("=")[0] == key for text in texts):
            raise RequestError(f"--set {key}: expected it once, got {request.declared()[key][1].option(key)} too")
    return [*texts, *(f"{key}={str(value).lower()}" for key, value in given.items())]


def question(cluster: Path | None, ranks: Sequence[int], texts: Sequence[str], policy: str | None) -> Question:
    """Read and check. Raises RequestError with file, key and what was expected."""
    what_if = settings_.read(texts, policy)
    links = clusters.load(cluster) if cluster else None
    if links is not None:
        settings_.applied(links, what_if)
    return Question(links, predicting.checked(ranks, links), what_if)


def read(profile: Path) -> Profile:
    """A profile of ranks that have the whole model. Raises RequestError with file, key and what was expected."""
    content = profiles.load(profile)
    axes = content.settings.get("parallel")
    if isinstance(axes, dict) and any(axes.get(axis, 1) != 1 for axis in ("pipeline", "tensor")):
        raise RequestError(
            f"{profile}: settings.parallel: expected ranks that have the whole model, from which --set "
            "parallel.pipeline=2 predicts others: pipeline 1 and tensor 1, got "
            f"{axes.get('pipeline')} and {axes.get('tensor')}"
        )
    return content
