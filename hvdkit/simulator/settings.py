"""What `--set` may change: the keys of a what-if, strict; and the cases that a profile, a cluster and they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from hvdkit.errors import RequestError
from hvdkit.recipe import yaml_files
from hvdkit.recipe.data import Strict
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import policies, wire
from hvdkit.simulator.cluster import Cluster, Level, Piece
from hvdkit.simulator.costs import Network
from hvdkit.simulator.step import Case
from hvdkit.simulator.workload import Workload

Positive = Annotated[float, Field(gt=0, le=1e15), AfterValidator(clusters.not_tiny)]
Allreduce = Annotated[str, Field(pattern="^(ring|halving-doubling|tree|hierarchical|central)$")]


class Compression(Strict):
    """As the recipe's `compression`."""

    method: str = "none"
    ratio: float = Field(0.01, gt=0, le=1)
    rank: int = Field(2, ge=1, le=1024)


class Sync(Strict):
    """As the recipe's `sync`."""

    every: int = Field(ge=1, le=2**31)


class Link(Strict):
    """A level of links with one rate or latency in place of the cluster file's pieces."""

    mbit_per_s: Positive | None = None
    latency_us: float | None = Field(None, ge=0, le=1e12)
    busy: float | None = Field(None, ge=0, lt=1)
    ports: int | None = Field(None, ge=1, le=1024)


class Settings(Strict):
    """A what-if. None leaves what the profile, the cluster or the policy has.

    `speed` is the device's against the profile's, `jitter` the coefficient of variation of a rank's compute,
    `link` by a level's name, `input` the ms that a batch takes to be read and decoded beside the device.
    """

    policy: str | None = None
    batch_size: int | None = Field(None, ge=1, le=2**24)
    compression: Annotated[
        Compression | None, BeforeValidator(lambda v: {"method": v} if isinstance(v, str) else v)
    ] = None
    sync: Sync | None = None
    allreduce: Allreduce | None = None
    servers: int = Field(1, ge=1, le=10**6)
    fusion_threshold_mib: float | None = Field(None, ge=0, le=1e15)
    cycle_time_ms: float | None = Field(None, ge=0, le=1e15)
    bucket_mib: Positive = 25.0
    speed: Positive = 1.0
    jitter: float | None = Field(None, ge=0, le=10)
    link: dict[str, Link] = Field({})
    seed: int = Field(1, ge=0, lt=2**32)


def read(texts: Sequence[str], policy: str | None = None, where: str = "--set") -> Settings:
    """The settings of `key=value` texts (nested keys with dots, values as YAML), and of `--policy`.

    Raises RequestError, a line for each fault, with the key and what was expected.
    """
    document: dict[str, Any] = {}
    faults = [fault for text in texts if (fault := yaml_files.override(document, text))]
    if faults:
        raise RequestError("\n".join(f"{where}: {fault}" for fault in faults))
    if policy is not None:
        document["policy"] = policy
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        known = ", ".join(Settings.model_fields)
        lines = clusters.told(error)
        raise RequestError(
            "\n".join(f"{where}: {line}{f'; known keys: {known}' if 'unknown' in line else ''}" for line in lines)
        ) from None
    if settings.policy is not None:
        policies.named(settings.policy)
    if settings.compression is not None and settings.compression.method not in wire.METHODS:
        methods = ", ".join(wire.METHODS)
        raise RequestError(f"{where}: compression: expected one of {methods}, got {settings.compression.method!r}")
    return settings


def applied(cluster: Cluster, settings: Settings) -> Cluster:
    """The cluster with the links that are set. Raises RequestError for a level that it has not."""
    names = [level.name for level in cluster.levels]
    for name in settings.link:
        if name not in names:
            raise RequestError(f"--set link.{name}: expected one of {cluster.name}'s levels {', '.join(names)}")
    if not settings.link:
        return cluster
    levels = [
        _level(level, settings.link[level.name]) if level.name in settings.link else level for level in cluster.levels
    ]
    # what was measured over other links says nothing of these
    return cluster.model_copy(update={"levels": levels, "measured": []})


def case(workload: Workload, network: Network, settings: Settings, defaults: Settings) -> Case:
    """What-if `settings` of a workload over a network; `defaults` for what they leave open."""

    def chosen(key: str, fallback: Any) -> Any:
        given = getattr(settings, key)
        given = getattr(defaults, key) if given is None else given
        return fallback if given is None else given

    compression, sync, allreduce = chosen("compression", Compression()), chosen("sync", None), chosen("allreduce", None)
    # hvdkit packs gradients for all that Horovod does not take as they are; the profile timed that for its own settings
    same = (sync, allreduce) == (defaults.sync, defaults.allreduce)
    own = compression == defaults.compression and (same or compression.method not in ("none", "fp16"))
    return Case(
        workload=workload,
        network=network,
        policy=chosen("policy", "horovod"),
        compression=wire.Compression(**compression.model_dump()),
        compression_s=workload.compression_s or None if own else None,
        algorithm=allreduce,
        threshold_bytes=chosen("fusion_threshold_mib", 64.0) * 2**20,
        cycle_s=1e-3 * chosen("cycle_time_ms", 1.0),
        bucket_bytes=settings.bucket_mib * 2**20,
        every=sync.every if sync else 1,
        servers=settings.servers,
        batch=(settings.batch_size or workload.batch_size) / workload.batch_size,
        speed=settings.speed,
    )


def _level(level: Level, link: Link) -> Level:
    pieces = [
        Piece(
            from_bytes=piece.from_bytes,
            latency_us=piece.latency_us if link.latency_us is None else link.latency_us,
            mbit_per_s=piece.mbit_per_s if link.mbit_per_s is None else link.mbit_per_s,
        )
        for piece in level.pieces
    ]
    changed = {key: getattr(link, key) for key in ("busy", "ports") if getattr(link, key) is not None}
    return level.model_copy(update={"pieces": pieces, **changed})
