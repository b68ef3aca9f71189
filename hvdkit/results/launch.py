"""The schema of `launch.json`."""

from __future__ import annotations

from typing import Any

from hvdkit.results.json_files import Count, Record, Result


class LaunchedRank(Record):
    """How a rank ended. `seconds` count from its start; None where nothing is known of its end."""

    rank: Count
    host: str
    exit_code: int | None = None
    signal: str | None = None
    seconds: float | None = None


class CollectiveUse(Record):
    """The collectives of one kind in rank 0's timeline: how many after fusion, of how many tensors, what one rank has
    put in, and how long their execution took in all. `bus_mbit_per_s` is what a link carried meanwhile, one way.
    """

    collective: str
    operations: Count
    tensors: Count
    bytes: Count
    seconds: float
    bus_mbit_per_s: float | None


class Launched(Record, Result, file="launch.json", of="what hvdkit launch has written"):
    """`launch.json`: a program that has run on all ranks. `failure` says why it has not ended well, None where it has.

    `command` is a rank's command line, `framework` that of its imports, None where it is not known. `seconds` count
    from the start of the ranks. `collectives` are there with --profile.
    """

    command: list[str]
    framework: str | None
    np: Count
    launcher: str
    seconds: float
    ranks: list[LaunchedRank]
    collectives: list[CollectiveUse] | None = None
    failure: str | None = None

    def records(self) -> list[dict[str, Any]]:
        """A row for each rank."""
        return [rank.model_dump() for rank in self.ranks]
