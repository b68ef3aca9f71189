"""The cluster file: what machines are joined by what links, strict and versioned, written in YAML.

A link is a piecewise line of time over bytes, for one message from a rank to its neighbour. Where whole collectives
have been measured (`hvdkit bench`), their own lines stand in `measured` and are believed first.
Some clusters come with hvdkit: `hvdkit/simulator/clusters/`.
"""

from __future__ import annotations

import bisect
import itertools
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from hvdkit.errors import RequestError, nearest
from hvdkit.files import write_atomic
from hvdkit.recipe import yaml_files
from hvdkit.recipe.data import Strict
from hvdkit.recipe.yaml_files import brief, named

SCHEMA_VERSION = 1
EXPECTED = "a cluster file (YAML) as `hvdkit bench` writes it"
Operation = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
Algorithm = Literal["ring", "halving-doubling", "tree", "hierarchical", "central"]


def not_tiny(value: float) -> float:
    """Raises ValueError for what is above 0 but divides to infinity."""
    if value < 1e-15:
        raise ValueError(f"expected at least 1e-15, got {value}")
    return value


Positive = Annotated[float, Field(gt=0, le=1e18), AfterValidator(not_tiny)]
Percent = Annotated[float, Field(ge=0, le=1000)]


class Piece(Strict):
    """time = latency_us + 8 × bytes / mbit_per_s µs, for messages of at least `from_bytes` up to the next piece's."""

    from_bytes: int = Field(ge=0, le=2**60)
    latency_us: float = Field(ge=0, le=1e13)
    mbit_per_s: Positive


Pieces = Annotated[list[Piece], Field(min_length=1, max_length=64)]


class Level(Strict):
    """Links that join groups of the level below (of single ranks, at the first): what one flow of messages gets.

    `ranks` are how many ranks it joins at most, None without a bound (the last level alone). Each group below has
    `ports` such links: several flows in one direction share them evenly. `busy` is the share that others take.
    `oversubscription` divides the rate where all groups send at once.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")
    ranks: int | None = Field(None, ge=2, le=10**9)
    pieces: Pieces
    ports: int = Field(1, ge=1, le=1024)
    oversubscription: float = Field(1.0, ge=1, le=1000)
    busy: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _in_order(self) -> Level:
        _check_pieces(self.pieces)
        return self


class Measured(Strict):
    """Whole collectives over `ranks` ranks, by bytes a rank: the fitted line, how well it fits, what it was fitted to.

    `residual_percent` is the root of the mean squared relative error over the points that were measured, from
    `smallest_bytes` to `largest_bytes`; beyond them a prediction is told to extrapolate.
    """

    operation: Operation
    ranks: int = Field(ge=2, le=10**9)
    ranks_per_host: int = Field(1, ge=1, le=10**6)
    algorithm: Algorithm = "ring"
    pieces: Pieces
    residual_percent: Percent
    smallest_bytes: int = Field(ge=0, le=2**60)
    largest_bytes: int = Field(ge=1, le=2**60)

    @model_validator(mode="after")
    def _in_order(self) -> Measured:
        _check_pieces(self.pieces)
        if self.smallest_bytes > self.largest_bytes:
            raise ValueError(f"expected smallest_bytes at most largest_bytes, got {self.smallest_bytes}")
        if self.ranks_per_host > self.ranks:
            raise ValueError(f"expected ranks_per_host at most ranks, got {self.ranks_per_host} and {self.ranks}")
        return self


class Device(Strict):
    """What computes. `relative_speed` is against other cluster files' devices (one P100 = 1), for `hvdkit advise`.

    `memory_bytes_per_s` is what copying within the device gets (fusion buffers, compression); `host_bytes_per_s` what
    copying to it gets.
    """

    name: str = Field(min_length=1, max_length=100)
    memory_mib: Positive | None = None
    relative_speed: Positive | None = None
    memory_bytes_per_s: Positive = 1e10
    host_bytes_per_s: Positive = 1e10
    launch_us: float = Field(5.0, ge=0, le=1e9, description="fixed cost of one copy or kernel")


class Software(Strict):
    """What the collective library costs beside the wires.

    A reduction adds up `reduction_bytes_per_s`; Horovod's coordinator needs `negotiation_us` a cycle and
    `negotiation_us_per_rank` more for each rank. `algorithms` are those among which the fastest is taken.
    With `synchronous` a collective holds up Horovod's loop until it has ended (Gloo and MPI; NCCL goes on).
    """

    reduction_bytes_per_s: Positive | None = None
    negotiation_us: float = Field(100.0, ge=0, le=1e12)
    negotiation_us_per_rank: float = Field(1.0, ge=0, le=1e9)
    algorithms: Annotated[list[Algorithm], Field(min_length=1)] = Field(["ring"])
    synchronous: bool = False


class Cluster(Strict):
    """All of it. `jitter` is the coefficient of variation of a rank's compute time from step to step.

    `residual_percent` is how far predictions of communication on this cluster are believed off where no measured
    collective says it better. `source` says where the figures are from.
    """

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    description: str = Field("", max_length=2000)
    source: str = Field("", max_length=4000)
    ranks_per_host: int = Field(1, ge=1, le=10**6)
    hosts: int | None = Field(None, ge=1, le=10**9, description="how many there are; None: as many as are asked for")
    device: Device
    levels: Annotated[list[Level], Field(min_length=1, max_length=4)]
    software: Software = Software()
    measured: Annotated[list[Measured], Field(max_length=1000)] = Field([])
    jitter: float = Field(0.0, ge=0, le=10)
    residual_percent: Percent = 15.0
    price_per_gpu_hour: Positive | None = None

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
        return self

    @property
    def largest(self) -> int | None:
        """How many ranks fit; None without a bound."""
        bounds = [bound for bound in (self.levels[-1].ranks, self._slots) if bound is not None]
        return min(bounds) if bounds else None

    @property
    def _slots(self) -> int | None:
        return None if self.hosts is None else self.hosts * self.ranks_per_host


def load(path: Path) -> Cluster:
    """Read a cluster file, or one that comes with hvdkit by its bare name, such as `v100-nvlink-ib`.

    Raises RequestError, a line for each fault with file, key and what was expected.
    """
    path = _shipped(path) or path
    names = shipped()
    either = f"{EXPECTED}, or one of {', '.join(map(repr, names))}{nearest(path.name, names)}"
    return read(yaml_files.load(path, EXPECTED, either), named(path))


def read(document: Any, where: str) -> Cluster:
    """The cluster of a document that has been parsed. Raises RequestError as `load` does."""
    if not isinstance(document, dict):
        raise RequestError(f"{where}: expected {EXPECTED}: keys with values, got {brief(document)}")
    version = document.get("schema_version")
    if isinstance(version, int) and not isinstance(version, bool) and version != SCHEMA_VERSION:
        raise RequestError(f"{where}: schema_version: expected {SCHEMA_VERSION}, got {version}; measure again")
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        raise RequestError("\n".join(dict.fromkeys(f"{where}: {line}" for line in told(error)))) from None


def save(cluster: Cluster, path: Path) -> None:
    """Write it as YAML; `load` reads it back equal. Raises RunError where the disk does not allow it."""
    write_atomic(path, yaml.safe_dump(cluster.model_dump(), sort_keys=False, width=120))


def shipped() -> list[str]:
    """The names of the clusters that come with hvdkit."""
    return sorted(path.stem for path in (Path(__file__).parent / "clusters").glob("*.yaml"))


def piece_at(pieces: list[Piece], size: float) -> Piece:
    """The piece that holds for a message of `size` bytes; the first one below its `from_bytes` too."""
    return pieces[max(0, bisect.bisect_right([piece.from_bytes for piece in pieces], size) - 1)]


def _shipped(path: Path) -> Path | None:
    if path.suffix or len(path.parts) != 1 or os.path.lexists(path) or path.name not in shipped():
        return None
    return Path(__file__).parent / "clusters" / f"{path.name}.yaml"


def _check_pieces(pieces: list[Piece]) -> None:
    starts = [piece.from_bytes for piece in pieces]
    if starts != sorted(set(starts)) or starts[0] != 0:
        raise ValueError(f"pieces: expected from_bytes that begin at 0 and rise, got {starts}")


def told(error: ValidationError) -> list[str]:
    """A line for each fault that pydantic has found: key, what was expected, what was received."""
    lines = []
    for fault in error.errors(include_url=False):
        key = ".".join(map(str, fault["loc"])) or "file"
        message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "expected", 1)
        if fault["type"] == "extra_forbidden":
            message = "unknown key"
        elif fault["type"] == "missing":
            message = "required key is missing"
        elif fault["type"] != "value_error":
            message = f"{message}, got {brief(fault.get('input'))}"
        lines.append(named(f"{key}: {message}"))
    return lines
