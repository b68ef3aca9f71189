"""The cluster file: a strict and versioned YAML description of machines and the links between them.

A link is a piecewise linear function of time over bytes, for one message from a rank to its neighbour. Collectives that
`hvdkit bench` has measured are in `measured` and take precedence over the links.
hvdkit ships some clusters in `hvdkit/simulator/clusters/`.
"""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from hvdkit.errors import RequestError, nearest
from hvdkit.files import write_atomic
from hvdkit.recipe import yaml_files
from hvdkit.recipe.data import Strict
from hvdkit.recipe.faults import MOST_FAULTS, NAME, explain
from hvdkit.recipe.yaml_files import brief, named
from hvdkit.results.bench import Collective as Operation
from hvdkit.results.profile import version

_SHIPPED = Path(__file__).parent / "clusters"
SCHEMA = "cluster.schema.json"  # beside the clusters, written by scripts/schemas.py
EXPECTED = "a cluster file (YAML) as `hvdkit bench` writes it"
MOST_FALL = 0.8  # of the time from one piece to the next: measured curves fall a little, protocols switch
Algorithm = Literal["ring", "halving-doubling", "tree", "hierarchical", "central"]
Way = Literal[Algorithm, "memory"]  # memory: wherever ranks share it


def not_tiny(value: float) -> float:
    """Raises ValueError for a number so small that dividing by it gives infinity."""
    if value < 1e-15:
        raise ValueError(f"expected at least 1e-15, got {value}")
    return value


Positive = Annotated[float, Field(gt=0, le=1e18), AfterValidator(not_tiny)]
Percent = Annotated[float, Field(ge=0, le=1000)]


class CurvePiece(Strict):
    """time = latency_us + 8 × bytes / mbit_per_s, in µs, from `from_bytes` up to the next piece's."""

    from_bytes: int = Field(ge=0, le=2**60, description="smallest size that this piece is for")
    latency_us: float = Field(ge=0, le=1e13, description="time that does not depend on the size")
    mbit_per_s: Positive = Field(description="rate, in 10^6 bits per second")

    def microseconds(self, size: float) -> float:
        """The time of so many bytes by this piece."""
        return self.latency_us + 8 * size / self.mbit_per_s

    def scaled(self, size: float, latency: float, rate: float, later_us: float = 0.0) -> CurvePiece:
        """The piece with its start, latency and rate times these factors, as far as a cluster file takes them."""
        return CurvePiece(
            from_bytes=min(2**60, round(self.from_bytes * size)),
            latency_us=min(1e13, max(0.0, self.latency_us * latency + later_us)),
            mbit_per_s=min(1e18, max(1e-15, self.mbit_per_s * rate)),
        )


def _rising(pieces: list[CurvePiece]) -> list[CurvePiece]:
    starts = [piece.from_bytes for piece in pieces]
    if starts != sorted(set(starts)) or starts[0] != 0:
        raise ValueError(f"expected from_bytes that begin at 0 and rise, got {starts}")
    for before, after in itertools.pairwise(pieces):
        ends, begins = before.microseconds(after.from_bytes), after.microseconds(after.from_bytes)
        if begins < ends * (1 - MOST_FALL) * (1 - 1e-6):  # not by rounding
            raise ValueError(
                f"expected times that rise with the bytes, got a fall from {ends:.6g} to {begins:.6g} us at "
                f"{after.from_bytes} bytes: raise latency_us of the piece from there, or take it out"
            )
    return pieces


Pieces = Annotated[list[CurvePiece], Field(min_length=1, max_length=64), AfterValidator(_rising)]


class Level(Strict):
    """Links between the groups of the level below (between single ranks, at the first level).

    Through `memory` the ranks of a host exchange bytes all at once: a message is what each of them gives the others in
    an exchange. Between hosts each rank then sends its part of a tensor.

    Only the last level's `ranks` may be None. Flows in one direction share a group's `ports` evenly. `contention` is of
    networks that are shared with others. `varies_percent` is of networks whose rate is another in each run, as in
    clouds: log-normal, so that 90 % of runs have at most 1 + varies_percent / 100 times the time, or its inverse.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$", description="name of the kind of link")
    kind: Literal["link", "memory"] = Field(
        "link", description="`memory` that the ranks of a host share; only the first level can be"
    )
    ranks: int | None = Field(None, ge=2, le=10**9, description="most ranks that it connects; null: no limit")
    pieces: Pieces = Field(description="time of one flow of messages by its bytes")
    ports: int = Field(1, ge=1, le=1024, description="such links that each group below has")
    oversubscription: float = Field(1.0, ge=1, le=1000, description="divides the rate when all groups send at once")
    busy: float = Field(0.0, ge=0, lt=1, description="fraction of the rate that other users take")
    contention: float = Field(
        0.0, ge=0, le=10, description="fraction by which bytes take longer for each doubling of groups beyond two"
    )
    varies_percent: Percent = Field(
        0.0, description="by how much its rate differs from run to run: 90 % of runs are within it, either way"
    )

    def crowded(self, groups: int) -> float:
        """The factor of the bytes' time if so many groups use this level."""
        return 1 + self.contention * max(0.0, math.log2(max(groups, 1) / 2))


class Measured(Strict):
    """The measured time of a collective. A prediction for a size beyond `largest_bytes` carries a warning."""

    operation: Operation = Field(description="the collective")
    ranks: int = Field(ge=2, le=10**9, description="how many took part")
    ranks_per_host: int = Field(1, ge=1, le=10**6, description="how many of them on each host")
    algorithm: Way = Field("ring", description="by which it was made; `memory`: that the ranks of a host share")
    pieces: Pieces = Field(description="its time by the bytes per rank")
    residual_percent: Percent = Field(description="relative error of the fit, root mean square")
    smallest_bytes: int = Field(ge=0, le=2**60, description="smallest size that was measured")
    largest_bytes: int = Field(ge=1, le=2**60, description="largest size that was measured")

    @model_validator(mode="after")
    def _in_order(self) -> Measured:
        if self.smallest_bytes > self.largest_bytes:
            raise ValueError(f"expected smallest_bytes at most largest_bytes, got {self.smallest_bytes}")
        if self.ranks_per_host > self.ranks:
            raise ValueError(f"expected ranks_per_host at most ranks, got {self.ranks_per_host} and {self.ranks}")
        return self


class Device(Strict):
    """What computes. `hvdkit advise` compares devices by `relative_speed`."""

    name: str = Field(min_length=1, max_length=100, description="name of the GPU or processor")
    memory_mib: Positive | None = Field(None, description="memory of a device; null: unknown")
    relative_speed: Positive | None = Field(None, description="speed in training relative to a P100")
    half_precision: Literal["none", "bf16", "fp16"] = Field(
        "none", description="the 16-bit format in which it computes; none: none, or unknown"
    )
    memory_bytes_per_s: Positive = Field(1e10, description="rate of copies within the device")
    host_bytes_per_s: Positive = Field(1e10, description="rate of copies from the host to the device")
    launch_us: float = Field(5.0, ge=0, le=1e9, description="fixed cost of one copy or kernel")

    @property
    def bytes(self) -> int | None:
        """Its memory; None if that is unknown."""
        return None if self.memory_mib is None else round(self.memory_mib * 2**20)


class Software(Strict):
    """What the collective library costs in addition to the links.

    With Horovod's cache ranks combine a bit vector to agree, without it a coordinator asks each of them. If
    `synchronous`, there is one stream. MPI without GPU support has `staging_bytes_per_s`.
    """

    reduction_bytes_per_s: Positive | None = Field(None, description="bytes that a reduction sums; null: no limit")
    negotiation_us: float = Field(100.0, ge=0, le=1e12, description="time in which Horovod's ranks agree in a cycle")
    negotiation_us_per_doubling: float = Field(
        20.0, ge=0, le=1e9, description="its further time for each doubling of ranks, with Horovod's cache"
    )
    negotiation_us_per_rank: float = Field(
        0.0, ge=0, le=1e9, description="its further time for each rank, without the cache (before Horovod 0.16)"
    )
    streams: int = Field(
        1, ge=1, le=64, description="collectives at once (HOROVOD_NUM_NCCL_STREAMS); they share the links' rates"
    )
    algorithms: Annotated[list[Algorithm], Field(min_length=1)] = Field(
        ["ring"], description="algorithms of allreduce, of which the library takes the fastest"
    )
    staging_bytes_per_s: Positive | None = Field(
        None, description="rate of copies to the host and back around each collective, for which the device waits"
    )
    several_hosts_us: float = Field(
        0.0, ge=0, le=1e12, description="time that each step takes longer once a second host takes part"
    )
    synchronous: bool = Field(
        False, description="Horovod waits for each collective (true of Gloo and MPI, not of NCCL)"
    )


class Cluster(Strict):
    """The whole file."""

    schema_version: Annotated[Literal[1], version(1, "measure again")] = Field(
        description="version of this kind of file"
    )
    name: str = Field(pattern=NAME, description="name of the cluster, for tables")
    description: str = Field("", max_length=2000, description="what it is")
    source: str = Field("", max_length=4000, description="where the figures come from")
    ranks_per_host: int = Field(1, ge=1, le=10**6, description="devices of a host")
    hosts: int | None = Field(None, ge=1, le=10**9, description="how many there are; None: no limit")
    device: Device = Field(description="what computes")
    levels: Annotated[list[Level], Field(min_length=1, max_length=4)] = Field(description="links, the innermost first")
    software: Software = Field(Software(), description="what the collective library costs beside the links")
    measured: Annotated[list[Measured], Field(max_length=1000)] = Field(
        [], description="measured collectives, which take precedence over the links"
    )
    jitter: float = Field(0.0, ge=0, le=10, description="coefficient of variation of a rank's compute time by step")
    residual_percent: Percent = Field(15.0, description="expected error where no measured collective says more")
    price_per_gpu_hour: Positive | None = Field(None, description="price of a device for an hour; null: unknown")
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="currency of the price, such as USD or EUR")
    price_source: str = Field("", max_length=1000, description="who asks that price, for what, and when")

    @model_validator(mode="after")
    def _levels_grow(self) -> Cluster:
        sizes = [level.ranks for level in self.levels]
        if sizes[-1] is not None and self.hosts is None:
            raise ValueError("levels: expected the last without `ranks`, or `hosts` to be given")
        inner = [size for size in sizes[:-1] if size is not None]
        bounds = inner if sizes[-1] is None else [*inner, sizes[-1]]
        if len(inner) != len(sizes) - 1 or any(b >= a or a % b for b, a in itertools.pairwise(bounds)):
            raise ValueError(f"levels: expected `ranks` that grow, each a multiple of the one before, got {sizes}")
        if len({level.name for level in self.levels}) != len(self.levels):
            raise ValueError("levels: expected each name once")
        first, *others = self.levels
        if any(level.kind == "memory" for level in others):
            raise ValueError("levels: expected memory as the first level only; it is within a host")
        if first.kind == "memory" and others and first.ranks != self.ranks_per_host:
            raise ValueError(
                f"levels: expected memory to have `ranks` as ranks_per_host, {self.ranks_per_host}, got {first.ranks}"
            )
        return self

    @property
    def one_host(self) -> bool:
        """Whether there is but the memory that ranks of a host share, and no link to another host."""
        return len(self.levels) == 1 and self.levels[0].kind == "memory"

    @property
    def largest(self) -> int | None:
        """How many ranks fit; None if there is no limit."""
        hosts = 1 if self.one_host else self.hosts
        slots = hosts and hosts * self.ranks_per_host
        return min((bound for bound in (self.levels[-1].ranks, slots) if bound is not None), default=None)


def load(path: Path) -> Cluster:
    """Read a cluster file, or one that hvdkit ships by its bare name, such as `v100-nvlink-ib`.

    Raises RequestError with a line for each fault: file, key and what was expected.
    """
    names = shipped()
    if len(path.parts) == 1 and path.name in names and not os.path.lexists(path):
        path = _SHIPPED / f"{path.name}.yaml"
    either = f"{EXPECTED}, or one of {', '.join(map(repr, names))}{nearest(path.name, names)}"
    return read(yaml_files.load(path, EXPECTED, either, Cluster), named(path))


def read(document: Any, where: str) -> Cluster:
    """The cluster in a parsed document. Raises RequestError as `load` does."""
    if not isinstance(document, dict):
        raise RequestError(f"{where}: expected {EXPECTED}: keys with values, got {brief(document)}")
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        raise RequestError(
            "\n".join(f"{where}: {line}" for line in explain(error, Cluster, "file")[:MOST_FAULTS])
        ) from None


def save(cluster: Cluster, path: Path) -> None:
    """Write it as YAML, which `load` reads back unchanged. Raises RunError if it cannot be written."""
    text = yaml_files.dump(cluster.model_dump(), width=120)
    write_atomic(path, yaml_files.schema_line(_SHIPPED / SCHEMA) + text)


def shipped() -> list[str]:
    """The names of the clusters that hvdkit ships."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))
