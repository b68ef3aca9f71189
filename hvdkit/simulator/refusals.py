"""What-ifs that no machine could run: a line for each, with the key and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hvdkit.errors import RequestError
from hvdkit.results.memory import Stage
from hvdkit.simulator import sharding
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.sharding import States
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
    return _sharding(case) or _hosts(case, settings.hosts) or _memory(case)


def memory_mib(case: Case) -> float | None:
    """A rank's memory in MiB; None if the profile does not have it."""
    if not case.workload.fixed_memory_bytes:
        return None
    return (_fixed(case) + case.workload.activation_bytes * case.batch) / 2**20


def memory_parts_mib(case: Case) -> dict[str, float] | None:
    """The same by part, where the profile has a device's memory; None elsewhere."""
    if not case.workload.state_bytes.total:
        return None
    kept = {name: getattr(_states(case), name) for name in ("parameters", "gradients", "optimizer")}
    kept |= {"communication": _buffers(case), "activations": case.workload.activation_bytes * case.batch}
    return {name: value / 2**20 for name, value in kept.items()}


def cheapest(case: Case) -> Stage | None:
    """The stage of sharding that fits and sends the least; None if none fits, or that is unknown."""
    if case.compression.method not in ("none", "fp16") or case.every > 1 or case.data_ranks == 1:
        return None
    cases = (replace(case, sharding=stage) for stage in case.workload.stages)
    return next((case.sharding for case in cases if _sharding(case) is None and _fits(case)), None)


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
    elif case.sharding != "optimizer" and case.workload.earlier_s:  # it would send each batch's gradients
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
    """A batch that a device has no room for, where its activations were measured."""
    needed, device, work = memory_mib(case), case.network.cluster.device, case.workload
    room = device.memory_mib
    if needed is None or room is None or _fits(case):
        return None
    size = round(case.batch * work.batch_size)
    left = room * 2**20 - _fixed(case)
    most = int(left / work.activation_bytes * work.batch_size)
    stage = None if case.sharding != "none" else cheapest(case)
    remedies = [f"--set batch_size={most} or less"] if most > 0 else []
    remedies += [f"--set sharding={stage}"] if stage else []
    remedy = ", or ".join(remedies) or "a device with more memory, or a smaller model"
    return f"batch_size: {size} needs about {needed:.0f} MiB on a device, {device.name} has {room:.0f}; give {remedy}"


def _fits(case: Case) -> bool:
    """Whether the device has the memory, or that is unknown."""
    needed, room = memory_mib(case), case.network.cluster.device.memory_mib
    return needed is None or room is None or not case.workload.activation_bytes or needed <= room


def _states(case: Case) -> States:
    """The model's states on the rank with the most."""
    work = case.workload
    return sharding.held_of(work.state_bytes, [tensor.shape for tensor in work.tensors], case.data_ranks, case.stage)


def _fixed(case: Case) -> float:
    """Bytes that do not depend on the batch."""
    work = case.workload
    return work.fixed_memory_bytes - work.state_bytes.total + _states(case).total + _buffers(case)


def _buffers(case: Case) -> float:
    """Bytes of the fusion buffer."""
    return case.threshold_bytes if case.rules.fuses and case.data_ranks > 1 else 0.0
