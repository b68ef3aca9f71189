"""The keys of `--set`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from hvdkit.core.pieces import PIECE_BYTES
from hvdkit.errors import RequestError
from hvdkit.recipe import yaml_files
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.data import Strict
from hvdkit.recipe.faults import explain
from hvdkit.results.memory import Stage
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import policies
from hvdkit.simulator.cluster import Algorithm, Cluster, Level, Measured
from hvdkit.simulator.compression_costs import CompressionSetting
from hvdkit.simulator.costs import PER_DOUBLING, ClusterLinks
from hvdkit.simulator.piecewise_linear import PiecewiseLinear

Positive = Annotated[float, Field(gt=0, le=1e15), AfterValidator(clusters.not_tiny)]


class SyncSetting(Strict):
    """The recipe's `sync`."""

    every: int = Field(ge=1, le=2**31)


class LinkSetting(Strict):
    """A level of links; what is given replaces the value in the cluster file.

    `mbit_per_s` is the rate of the largest messages, `latency_us` the latency of the smallest; the level's other pieces
    change along with them.
    """

    mbit_per_s: Positive | None = None
    latency_us: float | None = Field(None, ge=0, le=1e12)
    busy: float | None = Field(None, ge=0, lt=1)
    ports: int | None = Field(None, ge=1, le=1024)
    varies_percent: clusters.Percent | None = None


class Settings(Strict):
    """A what-if. None keeps the value of the profile, the cluster or the policy.

    `accumulate` is how many times as many batches an update takes as in the profile. `streams` is how many collectives
    may be under way at once (HOROVOD_NUM_NCCL_STREAMS). `speed` is the device's, relative to the profile's.
    `jitter` is the coefficient of variation of a rank's compute. `hosts` is how many hosts the ranks are spread
    over, as evenly as possible; None fills each before the next. `link` is by the name of the level. `parallel` is
    of a model that the ranks divide, with the keys that a recipe has there. `image_size` is a side in pixels,
    `sequence_length` the tokens of a window (`what_ifs`).
    """

    policy: str | None = None
    batch_size: int | None = Field(None, ge=1, le=2**24)
    accumulate: int = Field(1, ge=1, le=2**20)
    recompute: bool | None = None
    precision: Literal["fp32", "fp16", "bf16"] | None = None
    image_size: int | None = Field(None, ge=8, le=8192)
    sequence_length: int | None = Field(None, ge=1, le=2**20)
    compression: Annotated[
        CompressionSetting | None, BeforeValidator(lambda v: {"method": v} if isinstance(v, str) else v)
    ] = None
    sync: SyncSetting | None = None
    allreduce: Algorithm | None = None
    sharding: Stage | None = None
    servers: int = Field(1, ge=1, le=10**6)
    streams: int | None = Field(None, ge=1, le=64)
    hosts: int | None = Field(None, ge=1, le=10**9)
    fusion_threshold_mib: float | None = Field(None, ge=0, le=1e15)
    cycle_time_ms: float | None = Field(None, ge=0, le=1e15)
    bucket_mib: Positive = 25.0
    piece_mib: Positive = PIECE_BYTES / 2**20
    speed: Positive = 1.0
    jitter: float | None = Field(None, ge=0, le=10)
    link: dict[str, LinkSetting] = Field({})
    parallel: Parallel | None = None
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
    faults = [fault for text in texts if (fault := yaml_files.override(document, text, Settings))]
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
    for name in settings.link.keys() - set(names):
        raise RequestError(f"--set link.{name}: expected one of {cluster.name}'s levels {', '.join(names)}")
    levels = [_changed(level, settings.link.get(level.name, LinkSetting())) for level in cluster.levels]
    if levels == cluster.levels:
        return cluster
    new = cluster.model_copy(update={"levels": levels, "measured": []})
    old = cluster.model_copy(update={"measured": []})
    return new.model_copy(update={"measured": [_over(row, old, new) for row in cluster.measured]})


def _changed(level: Level, link: LinkSetting) -> Level:
    """The level with other links: the rate is that of large messages, and smaller ones change in proportion."""
    first, last = level.pieces[0], level.pieces[-1]
    faster = 1.0 if link.mbit_per_s is None else link.mbit_per_s / last.mbit_per_s
    later = 0.0 if link.latency_us is None else link.latency_us - first.latency_us
    if (faster, later) != (1.0, 0.0):
        pieces = [piece.scaled(faster, 1.0, faster, later) for piece in level.pieces]
        # Rounding can let two begin at the same size: the later one holds.
        distinct = list({piece.from_bytes: piece for piece in pieces}.values())
        level = level.model_copy(update={"pieces": distinct})
    return level.model_copy(update=link.model_dump(exclude_none=True, include={"busy", "ports", "varies_percent"}))


def _over(measured: Measured, old: Cluster, new: Cluster) -> Measured:
    """A measured collective over other links: its latency and rate change as the formulas' do.

    Each doubling of either adds to the expected error, but none that lets a better link's slow end rise.
    """

    def line(cluster: Cluster) -> PiecewiseLinear:
        placed = cluster.model_copy(update={"ranks_per_host": measured.ranks_per_host})
        return ClusterLinks(placed, measured.ranks).cost(measured.operation, measured.algorithm).line

    before, after = line(old), line(new)
    latency = float(after.latency[0]) / float(before.latency[0]) if before.latency[0] > 0 else 1.0
    bytes_s = float(after.slope[-1]) / float(before.slope[-1])
    far = max(abs(math.log2(factor)) for factor in (max(latency, 1e-6), bytes_s))
    pieces = [piece.scaled(1.0, latency, 1 / bytes_s) for piece in measured.pieces]
    # Over a better link no more is in doubt than what it may fail to bring.
    fails = 100 * (1 / max(latency, bytes_s, 1e-6) - 1) if max(latency, bytes_s) <= 1 else math.inf
    error = min(1000.0, measured.residual_percent + min(PER_DOUBLING * far, fails))
    return measured.model_copy(update={"pieces": pieces, "residual_percent": error})
