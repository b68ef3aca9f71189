"""What a run's debug logs come to, as lines."""

from __future__ import annotations

from hvdkit.results.debug import DebugLog, RankLog

_SHOWN = 8  # ranks, or rings
_LONGEST = 300  # characters of a problem


def lines(log: DebugLog) -> list[str]:
    """The transport, the ring, the ranks' interfaces and the first problem."""
    if not any(rank.lines for rank in log.ranks):
        return ["debug: neither Horovod nor NCCL has logged anything here; on other hosts see their logs"]
    carried = f"NCCL {log.nccl} over {log.network or 'one host'}" if log.nccl else log.cpu_operations or "unknown"
    shown = [f"debug: tensors by {carried}, negotiation by {log.controller or 'unknown'}"]
    if log.rings:
        ring = " → ".join(map(str, [*log.rings[0], log.rings[0][0]]))
        more = f", and {len(log.rings) - 1} other orders" if len(log.rings) > 1 else ""
        hops = "" if log.between_hosts is None else f"; {log.between_hosts} hops between hosts"
        shown.append(f"  ring: {ring}{more}{hops}")
    shown += [f"  {_shown(rank)}" for rank in log.ranks[:_SHOWN]]
    if len(log.ranks) > _SHOWN:
        shown.append(f"  and {len(log.ranks) - _SHOWN} more ranks")
    loopback = [str(rank.rank) for rank in log.ranks if rank.interface == "lo"]
    if loopback and len({rank.host for rank in log.ranks}) > 1:
        shown.append(f"  rank {', '.join(loopback)}: other hosts do not reach lo; set HOROVOD_GLOO_IFACE")
    first = log.first_problem
    problem = f"{first.name}: {first.text[:_LONGEST]}" if first else "none"
    return [*shown, f"  first warning or error: {problem}", f"  all of it: {log.folder / log.FILE}"]


def _shown(rank: RankLog) -> str:
    who = rank.name if rank.rank is None else f"rank {rank.rank}"
    where = f" on {rank.host}" if rank.host else ""
    device = f": {rank.device} over {rank.interface}, {rank.addresses}" if rank.interface else ""
    ways = ", ".join(f"{count} × {way}" for way, count in rank.ways.items())
    nccl = "".join([f"; NCCL over {rank.nccl_interface}" if rank.nccl_interface else "", f": {ways}" if ways else ""])
    return f"{who}{where}{device}{nccl}, {rank.lines} lines"
