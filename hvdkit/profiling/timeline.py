"""Reads Horovod's timeline: which collectives ran, the tensors fused into each, and when each was requested and ran."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, RootModel

from hvdkit.errors import RequestError
from hvdkit.results.json_files import read as read_json

_NEGOTIATING = "NEGOTIATE_"
# Activities before the data moves. All others, copies into and out of the fusion buffer too, are communication.
_BEFORE = {"INIT_FUSION_BUFFER", "QUEUE", "WAIT_FOR_DATA", "WAIT_FOR_OTHER_TENSOR_DATA"}
_ITEM_BYTES = {"bfloat16": 2}


@dataclass(frozen=True)
class Operation:
    """One collective after fusion, in nanoseconds of rank 0's monotonic clock.

    `requested` is when the first rank requested it, None if the timeline does not say. `bytes` are those of one rank.
    `link_bytes` are those that the busiest link carries one way, None for the usual algorithm over all ranks.
    """

    operation: str
    names: tuple[str, ...]
    bytes: int
    requested: int | None
    start: int
    end: int
    link_bytes: float | None = None


class _Event(BaseModel):
    ph: Literal["B", "E", "X", "M", "i"]
    name: str = ""
    ts: int = 0
    pid: int = 0
    args: dict[str, Any] = {}


class _Timeline(RootModel[list[_Event]]):
    root: Annotated[list[_Event], Field(min_length=1)]


@dataclass
class _Part:
    """One tensor's part of a collective, in microseconds from the start of the timeline.

    `group` numbers the fused collectives; `depth` counts the activities that are running; `start` is -1 until the data
    moves.
    """

    operation: str
    name: str
    group: int
    requested: int | None
    bytes: int = 0
    start: int = -1
    end: int = 0
    depth: int = 0


def read(path: Path, ahead: int = 0) -> list[Operation]:
    """The collectives in a timeline, in the order in which they began.

    `ahead` is how many nanoseconds rank 0's wall clock is ahead of its monotonic clock.
    Raises RequestError, one line, if the file is missing, truncated or not Horovod's.
    """
    events = read_json(_Timeline, path, "a whole timeline of Horovod's (profile again)").root
    named = [event for event in events if event.name == "process_name" and event.pid]
    names = {event.pid: str(event.args.get("name", "")) for event in named}
    begin = events[0].args.get("start_time_since_epoch_in_micros")
    if not isinstance(begin, int):
        raise RequestError(f"{path}: not a timeline of Horovod's: expected start_time_since_epoch_in_micros at first")
    parts = _parts([event for event in events if event.ph in "BE"], names, path)
    return sorted(_fused(parts, 1000 * begin - ahead), key=lambda operation: operation.start)


def _parts(events: list[_Event], names: dict[int, str], path: Path) -> Iterator[_Part]:
    """Each tensor's part of a collective, without those that were running when the timeline began or ended."""
    requested: dict[int, int] = {}
    running: dict[int, _Part] = {}
    group, moving = 0, False  # once a part of the newest group has gone on, a tensor that begins is of the next group
    for event in events:
        part = running.get(event.pid)
        if event.ph == "B" and event.name.startswith(_NEGOTIATING):
            requested.setdefault(event.pid, event.ts)
        elif event.ph == "B" and part is None:
            if moving:
                group, moving = group + 1, False
            name = names.get(event.pid, "")
            running[event.pid] = _Part(event.name, name, group, requested.pop(event.pid, None))
        elif event.ph == "B" and part is not None:
            moving = moving or part.group == group
            part.depth += 1
            if part.start < 0 and event.name not in _BEFORE:
                part.start = event.ts
        elif part is not None and part.depth:
            part.depth -= 1
        elif part is not None:
            del running[event.pid]
            moving = moving or part.group == group
            part.bytes, part.end = _size(event.args, path), event.ts
            part.start = event.ts if part.start < 0 else part.start
            yield part


def _size(args: dict[str, Any], path: Path) -> int:
    """The bytes of a tensor that Horovod describes as `float32` and `[64, 3]`."""
    if not args:
        return 0
    try:
        shape, dtype = json.loads(args["shape"]), str(args["dtype"])
        item = _ITEM_BYTES.get(dtype) or np.dtype(dtype).itemsize
        return int(np.prod([int(length) for length in shape], dtype=np.int64)) * item
    except (KeyError, TypeError, ValueError):
        raise RequestError(
            f"{path}: not a timeline of Horovod's: expected dtype and shape of a tensor, got {str(args)[:80]!r}"
        ) from None


def _fused(parts: Iterable[_Part], zero: int) -> Iterator[Operation]:
    groups: dict[int, list[_Part]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    for members in groups.values():
        requested = [member.requested for member in members if member.requested is not None]
        yield Operation(
            operation=members[0].operation.lower(),
            names=tuple(member.name for member in members),
            bytes=sum(member.bytes for member in members),
            requested=zero + 1000 * min(requested) if requested else None,
            start=zero + 1000 * min(member.start for member in members),
            end=zero + 1000 * max(member.end for member in members),
        )
