"""What-ifs that no machine could run: a line for each, with the key and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hvdkit.errors import RequestError
from hvdkit.results.memory import Stage
from hvdkit.simulator import case_memory, what_ifs
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.step import Case


def check(fitted: Calibration, cluster: Cluster, ranks: Iterable[int], settings: Settings) -> None:
    """Raise RequestError, with a line for each reason, if no machine could run `settings` at a number of ranks."""
    refused = [refusal(fitted.case(cluster, number, settings), settings) for number in ranks]
    if faults := dict.fromkeys(filter(None, refused)):
        raise RequestError("\n".join(faults))


def refusal(case: Case, settings: Settings) -> str | None:
    """Why `settings` are impossible for a case that they made; None if they are possible.

    Only what was asked for is refused: a profile's own allreduce falls back to a ring where there is one level.
    """
    cluster = case.network.cluster
    if settings.parallel is not None:
        return "parallel: only hvdkit predict and hvdkit plan know models that ranks divide; leave it out"
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
    if settings.streams and settings.streams > 1 and cluster.software.synchronous:
        return (
            f"streams: expected 1, got {settings.streams}: on {cluster.name} Horovod waits for each collective "
            "(Gloo, MPI); only NCCL has several streams"
        )
    if settings.streams and settings.streams > 1 and case.rules.in_turn:
        return (
            f"streams: expected 1, got {settings.streams}: policy {case.policy} sends its buckets one after the other; "
            "leave streams out, or take another policy"
        )
    work = case.workload.given or case.workload
    changed = what_ifs.refusal(work, settings, cluster.device)
    return changed or _sharding(case) or _hosts(case, settings.hosts) or _memory(case)


def cheapest(case: Case) -> Stage | None:
    """The stage of sharding that fits and sends the least; None if none fits, or that is unknown."""
    if case.compression.method not in ("none", "fp16") or case.every > 1 or case.data_ranks == 1:
        return None
    cases = (replace(case, sharding=stage) for stage in case.workload.stages)
    return next((case.sharding for case in cases if _sharding(case) is None and case_memory.fits(case)), None)


def _sharding(case: Case) -> str | None:
    if case.sharding == "none":
        return None
    reason = ""
    if case.compression.method not in ("none", "fp16"):
        reason = f"compression none or fp16, got {case.compression.method}"
    elif case.every > 1:
        reason = f"no sync, got every {case.every}"
    elif case.policy == "priority":
        reason = "another policy than priority, whose layers are updated one by one"
    elif case.algorithm not in (None, "ring"):
        reason = f"allreduce ring, got {case.algorithm}"
    elif case.sharding != "optimizer" and (
        case.workload.earlier_s or case.accumulate > 1
    ):  # it would send each batch's gradients
        reason = "a profile of one batch per update, got one of several (accumulate)"
    return f"sharding: {case.sharding} needs {reason}; leave out one of the two" if reason else None


def _hosts(case: Case, hosts: int | None) -> str | None:
    if hosts is None:
        return None
    cluster, ranks = case.network.cluster, case.network.ranks
    fewest = -(-ranks // cluster.ranks_per_host)
    most = 1 if cluster.one_host else min(ranks, cluster.hosts or ranks)
    if fewest <= hosts <= most:
        return None
    expected = fewest if fewest == most else f"{fewest} to {most}"
    return (
        f"hosts: expected {expected}, over which {ranks} ranks fit with {cluster.ranks_per_host} a host on "
        f"{cluster.name}, got {hosts}"
    )


def _memory(case: Case) -> str | None:
    """A batch that a device has no room for."""
    needed, room, work = case_memory.need(case), case_memory.room_bytes(case), case.workload
    if needed is None or room is None or case_memory.fits(case):
        return None
    size, device, most = (
        round(case.batch * work.batch_size),
        case.network.cluster.device,
        case_memory.largest_batch(case),
    )
    stage = None if case.sharding != "none" else cheapest(case)
    remedies = [f"--set batch_size={most} or less"] if most else []
    remedies += [f"--set sharding={stage}"] if stage else []
    remedy = ", or ".join(remedies) or "a device with more memory, or a smaller model"
    return (
        f"batch_size: {size} needs about {needed.total / 2**20:.0f} MiB on a device, {device.name} has "
        f"{device.memory_mib:.0f}, of which a tenth stays free; give {remedy}"
    )
