"""What-ifs that no machine could run: a line for each, with the key and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from hvdkit.errors import RequestError
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.step import Case


def check(found: Calibration, cluster: Cluster, ranks: Iterable[int], settings: Settings) -> None:
    """Raise RequestError, with a line for each reason, if no machine could run `settings` at a number of ranks."""
    refused = [refusal(found.case(cluster, number, settings), settings) for number in ranks]
    if faults := dict.fromkeys(filter(None, refused)):
        raise RequestError("\n".join(faults))


def refusal(case: Case, settings: Settings) -> str | None:
    """Why `settings` are impossible for a case that they made; None if they are possible.

    Only what was asked for is refused: a profile's own allreduce falls back to a ring where there is one level.
    """
    cluster = case.network.cluster
    if settings.servers > 1 and (case.algorithm or case.rules.algorithm) != "central":
        return (
            f"servers: expected 1, got {settings.servers}: only a central allreduce has servers; "
            "add --set allreduce=central, or leave servers out"
        )
    if settings.allreduce == "hierarchical" and len(cluster.levels) < 2:
        return (
            f"allreduce: hierarchical needs two levels of links, {cluster.name} has one ({cluster.levels[0].name}); "
            "take ring, or describe the links within a host in the cluster file"
        )
    return _hosts(case, settings.hosts) or _memory(case)


def memory_mib(case: Case) -> float | None:
    """A rank's memory in MiB; None if the profile does not have it."""
    fixed = case.workload.fixed_memory_bytes
    return (fixed + _buffers(case) + case.workload.activation_bytes * case.batch) / 2**20 if fixed else None


def _hosts(case: Case, hosts: int | None) -> str | None:
    if hosts is None:
        return None
    cluster, ranks = case.network.cluster, case.network.ranks
    fewest = -(-ranks // cluster.ranks_per_host)
    most = min(ranks, cluster.hosts or ranks)
    if fewest <= hosts <= most:
        return None
    expected = fewest if fewest == most else f"{fewest} to {most}"
    return (
        f"hosts: expected {expected}, over which {ranks} ranks fit with {cluster.ranks_per_host} a host on "
        f"{cluster.name}, got {hosts}"
    )


def _memory(case: Case) -> str | None:
    """A batch that a device has no room for, where its activations were measured."""
    needed, device, work = memory_mib(case), case.network.cluster.device, case.workload
    room = device.memory_mib
    if needed is None or room is None or not work.activation_bytes or needed <= room:
        return None
    size = round(case.batch * work.batch_size)
    left = room * 2**20 - work.fixed_memory_bytes - _buffers(case)
    most = int(left / work.activation_bytes * work.batch_size)
    remedy = f"--set batch_size={most} or less" if most > 0 else "a device with more memory, or a smaller model"
    return f"batch_size: {size} needs about {needed:.0f} MiB on a device, {device.name} has {room:.0f}; give {remedy}"


def _buffers(case: Case) -> float:
    """Bytes of the fusion buffer."""
    return case.threshold_bytes if case.rules.fuses and case.network.ranks > 1 else 0.0
