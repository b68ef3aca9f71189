"""Which rank or host is to blame for the end of a job, and when that is known. The order of reports does not matter."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hvdkit.errors import HvdkitError, RequestError
from hvdkit.launch.diagnosis.exits import Cause, RankEnd, RankFailure, rank_failure
from hvdkit.launch.job import Job
from hvdkit.worker.out_of_memory import OUT_OF_MEMORY

# What signals mean that hvdkit does not send.
_OTHERS = "sent by a user, or by another program; hvdkit has not sent it"
_SIGNALS = {
    "SIGKILL": _OTHERS,
    "SIGTERM": _OTHERS,
    "SIGHUP": _OTHERS,
    "SIGINT": _OTHERS,
    "SIGBUS": "memory that is a file has no room any more, such as /dev/shm, or the file was cut",
    "SIGXCPU": "it has used its processor time: see `ulimit -t`",
    "SIGXFSZ": "a file has reached its largest size: see `ulimit -f`",
}
# In Horovod's error of a collective whose requests do not fit: ranks that asked for the same.
_ASKED = re.compile(r"\brank (\d+(?:, \d+)*):")
_TRACEBACK = "Traceback (most recent call last):"
LESS_MEMORY = "use a smaller batch_size (`accumulate` makes up for it), see `hvdkit memory`"
# Gloo's and Horovod's own words for a wait that was too long, over sockets or in shared memory.
_TIMED_OUT = re.compile(r"Timed out waiting \d+ ?ms|Wait timeout after|Application timeout|(Read|Write) timeout \[")
_MORE_TIME = "if its links are slow rather than broken, give more time: HOROVOD_GLOO_TIMEOUT_SECONDS=300, 30 by default"
_OOM_KILLER = {
    True: f"by the kernel's out-of-memory killer: {LESS_MEMORY}",
    None: "often the kernel's out-of-memory killer: see `dmesg`, or use a smaller batch_size",
}


@dataclass(frozen=True)
class Verdict:
    """The rank to blame; where it has not failed by itself, `lost_by` has the ranks that lost it."""

    end: RankEnd
    lost_by: tuple[RankEnd, ...] = ()
    others: tuple[RankEnd, ...] = ()  # that may have been lost, where several may
    unlike: tuple[RankEnd, ...] = ()  # the other ranks of a collective whose requests do not fit


def judge(ends: Iterable[RankEnd]) -> Verdict | None:
    """Who is to blame; None where no rank failed. It depends on the ends alone, not on their order.

    The strongest cause decides (`Cause`), the earliest failure among alike. Peers of a dead rank fail within
    milliseconds, and may end before a rank that still cleans up; so a rank that lost a peer is to blame only where
    there is no evidence against another one. Where a single rank had neither failed nor ended, it is the one they lost.
    """
    every = list(ends)
    failed = [end for end in every if end.failed]
    if not failed:
        return None
    frozen = [end for end in every if end.cause is Cause.FROZEN]
    first = min(failed + frozen, key=lambda end: (end.cause, end.failed_at, end.rank, end.name))
    left = sorted((end for end in every if end.cause is Cause.STOPPED), key=lambda end: (end.rank, end.name))
    if first.cause is not Cause.LOST:
        # What has ended it may have lost its way to one of the others, as mpirun by ssh.
        taken = (end for end in failed if end is not first and first.cause is end.cause is Cause.TAKEN)
        unlike = tuple(end for end in every if end is not first and end.rank in _unlike(first))
        return Verdict(first, others=(*taken, *(left if first.cause is Cause.TAKEN else ())), unlike=unlike)
    lost_it = tuple(sorted(failed, key=lambda end: (end.rank, end.name)))
    if len(left) == 1:
        return Verdict(left[0], lost_by=lost_it)
    well = (end for end in every if end.cause is Cause.WELL)
    return Verdict(first, others=(*left, *sorted(well, key=lambda end: end.rank)))


def decided(ends: Collection[RankEnd], np: int, now: float, settle_s: float) -> bool:
    """Whether enough is known to end the ranks that are left: a rank has failed, and not because of another.

    Where all that failed only lost a peer, that peer has `settle_s` seconds from the first of them to end by itself.
    """
    failed = [end for end in ends if end.failed]
    if not failed:
        return False
    if any(not end.secondary for end in failed) or len(ends) == np:
        return True
    return now >= min(end.reported_at for end in failed) + settle_s


def failure(job: Job, verdict: Verdict) -> HvdkitError:
    """The error that names the rank: RequestError where the rank itself found the request wrong, else RankFailure."""
    early = [other for other in verdict.others if other.cause is Cause.WELL]
    if job.program and verdict.end.cause is Cause.LOST and len(early) == len(verdict.others) == 1:
        verdict = Verdict(early[0], lost_by=(verdict.end,))  # it has no word for that its work is done
    end = verdict.end
    if end.record is not None and end.record.kind == "request" and not end.after_stop:
        return RequestError(end.record.message + _remedy(end))
    what = f"rank {end.rank} on {end.host} {_lost(verdict) if verdict.lost_by else _how(end)}"
    for other in verdict.others[:8]:
        well = "ended with exit code 0" + ("" if other.seconds is None else f" after {other.seconds:.1f} s")
        meanwhile = {Cause.WELL: well, Cause.TAKEN: "was ended too"}.get(other.cause, "had not ended by then")
        what += f"{'; ' if other is verdict.others[0] else ', '}rank {other.rank} on {other.host} {meanwhile}"
    for other in verdict.unlike[:8]:
        what += f"{', in a collective with' if other is verdict.unlike[0] else ','} rank {other.rank} on {other.host}"
    return rank_failure(job, what, end)


def unreachable(job: Job, ends: list[RankEnd]) -> RankFailure | None:
    """The error where hosts do not reach each other; None where all have answered.

    It names the host that has lost its connection to most others, whether they got no answer from it or it from them:
    which of the two is seen depends on who was sending. Of several such hosts it names the one that most others got no
    answer from; of several of those, as with two hosts alone, all.
    """
    hosts = {end.address: end.host for end in ends if end.address}
    accusers: dict[str, set[str]] = defaultdict(set)
    accused: dict[str, set[str]] = defaultdict(set)
    for end in ends:
        for address in end.unanswered:
            whom = hosts.get(address, address)
            accusers[whom].add(end.host)
            accused[end.host].add(whom)
    if not accusers:
        return None
    weight = {host: (len(accusers[host] | accused[host]), len(accusers[host])) for host in {*accusers, *accused}}
    blamed = sorted(host for host in weight if weight[host] == max(weight.values()))
    end = next((end for end in ends if end.host == blamed[0]), ends[0])
    by, whom = (", ".join(sorted(names[blamed[0]])) for names in (accusers, accused))
    if len(blamed) > 1:
        message = f"hosts {', '.join(blamed)} did not answer each other: the way between them is broken"
    elif by:
        message = f"host {blamed[0]} did not answer {by}: its link or the way to it is broken, or the machine is dead"
    else:
        message = f"host {blamed[0]} got no answer from {whom}: its link or the way from it is broken"
    return rank_failure(job, message, end)


def _unlike(end: RankEnd) -> set[int]:
    """The ranks of a collective whose requests do not fit, where that is what the rank says of its failure."""
    message = end.record.message if end.record else ""
    return {int(rank) for ranks in _ASKED.findall(message) for rank in ranks.split(", ") if "ismatched" in message}


def _how(end: RankEnd) -> str:
    """How a rank failed, in words."""
    after = "" if end.seconds is None else f" after {end.seconds:.1f} s"
    if end.frozen:
        how = "did not answer: it was frozen by a signal (SIGSTOP, or a debugger)"
    elif end.outside:
        how = f"was ended{after} by a signal that hvdkit has not sent: is its node, or the job's share of it, gone?"
    elif end.signal is not None and end.stopped:  # it had failed, but not ended, when another one did
        how = f"was ended with the others{after}"
    elif end.signal is not None:
        how = f"was killed by {end.signal}{after}"
        why = _OOM_KILLER.get(end.out_of_memory) if end.signal == "SIGKILL" else None
        why = why or _SIGNALS.get(end.signal)
        how += f" ({why})" if why else ""
    elif end.exit_code is not None:
        how = f"ended with exit code {end.exit_code}{after}"
        how += ", before its work was done" if end.left_early else ""
    else:
        how = f"vanished{after}: nothing is known of its end"
    if end.record is not None:
        step = "" if end.record.step is None else f" at step {end.record.step}"
        lines = end.record.message.strip().splitlines() or [""]
        bare = lines[0].rpartition(": ")[2] in ("", _TRACEBACK)  # as of torch's spawn and MXNet: their own comes last
        why = lines[-1].strip() if bare else lines[0]
        how = f"failed{step}: {why} ({how})"
    return how + _remedy(end)


def _remedy(end: RankEnd) -> str:
    """What to do about a failure, as far as that shows in a rank's record or, of a program, in its output."""
    record = end.record
    if record is None:
        return f"; {_MORE_TIME}" if end.secondary and _TIMED_OUT.search(end.tail) else ""
    if OUT_OF_MEMORY.search(record.message):
        return f"; {LESS_MEMORY}"
    return f"; {_MORE_TIME}" if record.kind == "communication" and _TIMED_OUT.search(record.message) else ""


def _lost(verdict: Verdict) -> str:
    """What is known of a rank that others lost: it had not ended by then, or too early."""
    ranks = ", ".join(str(end.rank) for end in verdict.lost_by)
    if verdict.end.cause is Cause.WELL:
        return f"{_how(verdict.end)}, while rank {ranks} still worked with it"
    state = "had not ended by itself" if verdict.end.known else "nothing is known of its end"
    remedies = map(_remedy, verdict.lost_by)
    return f"was lost by rank{'s' if len(verdict.lost_by) > 1 else ''} {ranks}, and {state}{max(remedies, default='')}"
