"""What the collectives of a program come to, by Horovod's timeline."""

from __future__ import annotations

from pathlib import Path

from hvdkit.profiling import timeline
from hvdkit.results.bus import sent_bytes
from hvdkit.results.launch import CollectiveUse


def used(path: Path, np: int) -> list[CollectiveUse]:
    """The collectives of `np` ranks by kind, longest first. Raises RequestError as `timeline.read` does."""
    kinds: dict[str, list[timeline.Operation]] = {}
    for operation in timeline.read(path):
        kinds.setdefault(operation.operation, []).append(operation)
    uses = []
    for kind, operations in kinds.items():
        size = sum(operation.bytes for operation in operations)
        seconds = sum(operation.end - operation.start for operation in operations) / 1e9
        rate = 8e-6 * sent_bytes(kind, size, np) / seconds if seconds and np > 1 else None
        tensors = sum(len(operation.names) for operation in operations)
        uses.append(
            CollectiveUse(
                collective=kind,
                operations=len(operations),
                tensors=tensors,
                bytes=size,
                seconds=seconds,
                bus_mbit_per_s=rate,
            )
        )
    return sorted(uses, key=lambda use: -use.seconds)
