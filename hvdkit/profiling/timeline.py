"""Horovod's timeline, read: which collectives ran, what was fused into each, when it was asked for, begun and over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from hvdkit.errors import RequestError, first_fault

_NEGOTIATING = "NEGOTIATE_"
# Activities before the data moves; all others, copies into and out of the fusion buffer too, are communication.
_BEFORE = {"INIT_FUSION_BUFFER", "QUEUE", "WAIT_FOR_DATA", "WAIT_FOR_OTHER_TENSOR_DATA"}
_ITEM_BYTES = {"bfloat16": 2}


@dataclass(frozen=True)
class Operation:
    """One collective after fusion, in nanoseconds of rank 0's monotonic clock.

    `asked` is when the first rank asked for it, as far as the timeline tells; `bytes` are a rank's part. `link_bytes`
    are those that the busiest link carries one way; None where all ranks have taken part, in the usual way.
    """

    operation: str
    names: tuple[str, ...]
    bytes: int
    asked: int | None
    start: int
    end: int
    link_bytes: float | None = None


class _Event(BaseModel):
    ph: Literal["B", "E", "X", "M", "i"]
    name: str = ""
    ts: int = 0
    pid: int = 0
    args: dict[str, Any] = {}


@dataclass
class _Open:
    """A tensor's collective that is not over yet; `depth` counts its activities under way."""

    operation: str
    asked: int | None
    group: int
    start: int | None = None
    last: int = 0
    depth: int = 0


def read(path: Path, ahead: int = 0) -> list[Operation]:
    """The collectives in a timeline, in the order in which they began.

    `ahead` is how many nanoseconds rank 0's wall clock is ahead of its monotonic one.
    Raises RequestError, one line, where the file is missing, cut or none of Horovod's.
    """
    events = _events(path)
    named = [event for event in events if event.name == "process_name" and event.pid]
    names = {event.pid: str(event.args.get("name", "")) for event in named}
    begin = events[0].args.get("start_time_since_epoch_in_micros")
    if not isinstance(begin, int):
        raise RequestError(f"{path}: not a timeline of Horovod's: expected start_time_since_epoch_in_micros at first")
    found = _collect([event for event in events if event.ph in "BE"], names, path)
    zero = 1000 * begin - ahead
    return sorted(_fused(found, zero), key=lambda each: each.start)


@dataclass(frozen=True)
class _Done:
    """One tensor's part; microseconds since the timeline's begin."""

    group: int
    operation: str
    name: str
    bytes: int
    asked: int | None
    start: int
    end: int


def _events(path: Path) -> list[_Event]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); expected a timeline of Horovod's") from None
    try:
        events = TypeAdapter(list[_Event]).validate_python(json.loads(content))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            told = first_fault(error)
        elif isinstance(error, json.JSONDecodeError):
            told = f"cut or damaged at byte {error.pos} of {len(content)} ({error.msg})"
        else:
            told = "damaged"
        raise RequestError(f"{path}: not a whole timeline of Horovod's: {told}; profile again") from None
    if not events:
        raise RequestError(f"{path}: not a whole timeline of Horovod's: it is empty; profile again")
    return events


def _collect(events: list[_Event], names: dict[int, str], path: Path) -> Iterator[_Done]:
    """Each tensor's collective. What was under way when the timeline began or ended is left out."""
    asked: dict[int, int] = {}
    running: dict[int, _Open] = {}
    group, moving = 0, False  # whether the newest group is past its beginnings: who begins now is the next one's
    for event in events:
        state = running.get(event.pid)
        if event.ph == "B" and event.name.startswith(_NEGOTIATING):
            asked.setdefault(event.pid, event.ts)
        elif event.ph == "B" and state is None:
            if moving:
                group, moving = group + 1, False
            running[event.pid] = _Open(event.name, asked.pop(event.pid, None), group)
        elif event.ph == "B" and state is not None:
            moving = moving or state.group == group
            state.depth += 1
            if state.start is None and event.name not in _BEFORE:
                state.start = event.ts
        elif state is not None and state.depth:
            state.depth -= 1
        elif state is not None:
            del running[event.pid]
            moving = moving or state.group == group
            start = event.ts if state.start is None else state.start
            name, size = names.get(event.pid, ""), _size(event.args, path)
            yield _Done(state.group, state.operation, name, size, state.asked, start, event.ts)


def _size(args: dict[str, Any], path: Path) -> int:
    """Bytes of a tensor that Horovod describes as `float32` and `[64, 3]`."""
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


def _fused(found: Iterator[_Done], zero: int) -> Iterator[Operation]:
    groups: dict[int, list[_Done]] = {}
    for each in found:
        groups.setdefault(each.group, []).append(each)
    for members in groups.values():
        asked = [each.asked for each in members if each.asked is not None]
        yield Operation(
            operation=members[0].operation.lower(),
            names=tuple(each.name for each in members),
            bytes=sum(each.bytes for each in members),
            asked=zero + 1000 * min(asked) if asked else None,
            start=zero + 1000 * min(each.start for each in members),
            end=zero + 1000 * max(each.end for each in members),
        )
