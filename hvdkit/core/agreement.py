"""Checks that all ranks agree on their settings before they train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.core.seam import Adapter
from hvdkit.core.topology import Topology
from hvdkit.errors import RequestError


def check_alike(adapter: Adapter, topology: Topology, settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings (values by dotted key); collective.

    Raises RequestError, the same on every rank, naming each key that differs and the ranks' values.
    """
    if topology.size == 1:
        return
    everyone = adapter.allgather_object(dict(settings), name="settings")
    faults = []
    for key in sorted({key for each in everyone for key in each}):
        values = [each.get(key, "nothing") for each in everyone]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            faults.append(
                f"{key}: expected the same on all ranks, got {values[0]} on rank 0 and {values[other]} on rank {other}"
            )
    if faults:
        raise RequestError("\n".join(faults))
