"""`hvdkit predict` and `hvdkit advise`: what is asked for, checked; the answer, written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.files import write_atomic
from hvdkit.profiling import profile as profiles
from hvdkit.profiling.profile import Profile
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import settings as settings_
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


def plan(profile: Path, cluster: Path, ranks: Sequence[int], texts: Sequence[str], policy: str | None) -> Plan:
    """Read and check. Raises RequestError with file, key and what was expected."""
    what_if = settings_.read(texts, policy)
    links = settings_.applied(clusters.load(cluster), what_if)
    return Plan(profiles.load(profile), links, predicting.checked(ranks, links), what_if)


def predict(plan: Plan, folder: Path) -> Prediction:
    """Answer, and write `predict.json` into the folder. Raises RunError where it cannot be written."""
    found = predicting.predict(plan.profile, plan.cluster, plan.ranks, plan.settings)
    write_atomic(folder / "predict.json", found.model_dump_json(indent=2) + "\n")
    return found
