"""The keys of `--set`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from hvdkit.errors import RequestError
from hvdkit.recipe import yaml_files
from hvdkit.recipe.data import Strict
from hvdkit.recipe.faults import explain
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import policies
from hvdkit.simulator.cluster import Algorithm, Cluster, Level
from hvdkit.simulator.compression_costs import Compression

Positive = Annotated[float, Field(gt=0, le=1e15), AfterValidator(clusters.not_tiny)]


class Sync(Strict):
    """The recipe's `sync`."""

    every: int = Field(ge=1, le=2**31)


class Link(Strict):
    """A level of links; what is given replaces the value in the cluster file, for all pieces."""

    mbit_per_s: Positive | None = None
    latency_us: float | None = Field(None, ge=0, le=1e12)
    busy: float | None = Field(None, ge=0, lt=1)
    ports: int | None = Field(None, ge=1, le=1024)


class Settings(Strict):
    """A what-if. None keeps the value of the profile, the cluster or the policy.

    `speed` is the device's, relative to the profile's. `jitter` is the coefficient of variation of a rank's compute.
    `link` is by the name of the level.
    """

    policy: str | None = None
    batch_size: int | None = Field(None, ge=1, le=2**24)
    compression: Annotated[
        Compression | None, BeforeValidator(lambda v: {"method": v} if isinstance(v, str) else v)
    ] = None
    sync: Sync | None = None
    allreduce: Algorithm | None = None
    servers: int = Field(1, ge=1, le=10**6)
    fusion_threshold_mib: float | None = Field(None, ge=0, le=1e15)
    cycle_time_ms: float | None = Field(None, ge=0, le=1e15)
    bucket_mib: Positive = 25.0
    speed: Positive = 1.0
    jitter: float | None = Field(None, ge=0, le=10)
    link: dict[str, Link] = Field({})
    seed: int = Field(1, ge=0, lt=2**32)


def read(texts: Sequence[str], policy: str | None = None, where: str = "--set") -> Settings:
    """The settings from `key=value` texts (nested keys with dots, values as YAML) and from `--policy`.

    Raises RequestError with a line for each fault: the key and what was expected.
    """
    given = parsed(texts, where)
    return validated(given if policy is None else given | {"policy": policy}, where)


def parsed(texts: Sequence[str], where: str) -> dict[str, Any]:
    """The document that `key=value` texts make. Raises RequestError with a line for each that is none."""
    document: dict[str, Any] = {}
    faults = [fault for text in texts if (fault := yaml_files.override(document, text))]
    if faults:
        raise RequestError("\n".join(f"{where}: {fault}" for fault in faults))
    return document


def validated(document: dict[str, Any], where: str) -> Settings:
    """The settings in a document. Raises RequestError with a line for each fault."""
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        raise RequestError("\n".join(f"{where}: {line}" for line in explain(error, Settings, "file"))) from None
    if settings.policy is not None:
        policies.named(settings.policy)
    return settings


def applied(cluster: Cluster, settings: Settings) -> Cluster:
    """The cluster with the links of the settings. Raises RequestError for a level that the cluster does not have."""
    names = [level.name for level in cluster.levels]
    for name in settings.link:
        if name not in names:
            raise RequestError(f"--set link.{name}: expected one of {cluster.name}'s levels {', '.join(names)}")
    if not settings.link:
        return cluster
    levels = [_changed(level, settings.link.get(level.name, Link())) for level in cluster.levels]
    # measurements over the old links do not hold for the new ones
    return cluster.model_copy(update={"levels": levels, "measured": []})


def _changed(level: Level, link: Link) -> Level:
    given = link.model_dump(exclude_none=True)
    rates: dict[str, float] = {key: given.pop(key) for key in ("mbit_per_s", "latency_us") if key in given}
    return level.model_copy(update={"pieces": [piece.model_copy(update=rates) for piece in level.pieces], **given})
