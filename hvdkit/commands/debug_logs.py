"""`--debug`: makes Horovod, NCCL and Gloo log what they do, collects that by rank, and says what it comes to."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.files import open_regular, unwritable, write_atomic
from hvdkit.launch.job import Job
from hvdkit.results.debug import DebugLog, Problem, RankLog

_SHOWN = 8  # ranks, or rings
_LONGEST = 300  # characters of a problem
FOLDER = "debug"
# What a user has set stays.
VARIABLES = {"HOROVOD_LOG_LEVEL": "debug", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}

# [2026-11-23 18:24:20.397819: D /…/gloo_context.cc:163] …, and the same without the time (HOROVOD_LOG_HIDE_TIME)
_HOROVOD = re.compile(r"\[(?P<time>\d{4}-\d\d-\d\d [\d:. ]+: )?(?P<level>[TDIWEF]) \S+\.(?:cc|h):\d+\] (?P<text>.*)")
_NCCL = re.compile(r"\bNCCL (?P<level>INFO|WARN|TRACE|version)\b ?(?P<text>.*)")  # host:pid:tid [0] NCCL INFO …
_GLOO = re.compile(r"\[[^\]]*\bgloo/[^\]]*\.(?:cc|h):\d+\]")

_STARTED = re.compile(
    r"(?:global|local_(?P<host>\S+)) rendezvous started for rank=(?P<rank>\d+), size=\d+, "
    r"dev=\{(?P<device>[^,}]*),.*?iface=(?P<interface>[^,}]*).*?addr=\[(?P<addresses>.*?)\]\}"
)
_USES = re.compile(r"Using (?P<what>\w+) to perform (?P<of>controller|CPU) operations")
_NETWORK = re.compile(r"Using network (?P<name>\S+)")
_INTERFACE = re.compile(r"NET/\w+ : Using (?P<interface>\S+)")
_VERSION = re.compile(r"NCCL version (?P<version>\S+)")
_RING = re.compile(r"Channel \d+/\d+ : +(?P<ranks>\d+(?: +\d+)+)")
_WAY = re.compile(r"Channel \S+ : \S+ -> \S+ .*?via (?P<way>\S+)")


def collect(logs: Path, folder: Path, hosts: Mapping[int, str] | None = None) -> DebugLog:
    """Write the libraries' lines of each rank's log in `logs`, and debug.json, into `folder`, which is made.

    `hosts` are the ranks' hosts as far as they are known; logs say it only where the ranks have found each other.

    Raises RunError where nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.log"):
            old.unlink()
    except OSError as error:
        raise unwritable(folder, error, "or choose another --out") from error
    said = {log.stem: list(_lines(log)) for log in sorted([*logs.glob("rank-*.log"), *logs.glob("worker-*.log")])}
    for name, lines in said.items():
        write_atomic(folder / f"{name}.log", "".join(f"{line}\n" for line in lines))
    return summary(said, hosts or {}).written(folder)


def collected(job: Job) -> None:
    """Collect them and say what they come to; how the run itself ended matters more than a full disk."""
    with suppress(HvdkitError, OSError):
        hosts = {} if job.elastic else {slot.rank: slot.hostname for slot in job.slots()}
        log = collect(job.log_dir, job.log_dir.parent / FOLDER, hosts)
        print("\n".join(lines(log)), file=sys.stderr, flush=True)


def summary(said: Mapping[str, list[str]], known: Mapping[int, str]) -> DebugLog:
    """What the lines come to, by the name of a rank's log; `known` are hosts by rank."""
    ranks = sorted(
        (_rank(name, lines, known) for name, lines in said.items()), key=lambda rank: (rank.rank is None, rank.rank)
    )
    every = [line for lines in said.values() for line in lines]
    uses = {match["of"]: match["what"] for line in every if (match := _USES.search(line))}
    rings = _rings(every)
    hosts = {rank.rank: rank.host for rank in ranks if rank.rank is not None and rank.host}
    if not rings and uses.get("CPU") == "GLOO" and len(hosts) > 1:
        rings = [sorted(hosts)]
    complete = bool(rings) and set(rings[0]) <= hosts.keys()
    return DebugLog(
        controller=uses.get("controller"),
        cpu_operations=uses.get("CPU"),
        nccl=next((match["version"] for line in every if (match := _VERSION.search(line))), None),
        network=next((match["name"] for line in every if (match := _NETWORK.search(line))), None),
        rings=rings,
        between_hosts=_between_hosts([str(hosts[rank]) for rank in rings[0]]) if complete else None,
        first_problem=_first_problem(said),
        ranks=ranks,
    )


def _lines(log: Path) -> Iterator[str]:
    """The lines of a rank's log that Horovod, NCCL or Gloo has written."""
    with open_regular(log) as file:
        for raw in file:
            line = raw.decode("utf-8", "replace").rstrip()
            if _HOROVOD.match(line) or _NCCL.search(line) or _GLOO.search(line):
                yield line


def _rank(name: str, lines: Iterable[str], known: Mapping[int, str]) -> RankLog:
    log = RankLog(name=name, lines=0)
    ways: Counter[str] = Counter()
    for line in lines:
        log.lines += 1
        if match := _STARTED.search(line):
            if match["host"] is None:
                log.rank, log.device = int(match["rank"]), match["device"]
                log.interface, log.addresses = match["interface"], match["addresses"]
            elif log.host is None:
                log.host = match["host"]
        elif match := _INTERFACE.search(line):
            log.nccl_interface = match["interface"]
        elif match := _WAY.search(line):
            ways[match["way"]] += 1
        if log.first_problem is None and _is_problem(line):
            log.first_problem = line
    log.ways = dict(ways)
    if log.rank is not None and log.host is None:
        log.host = known.get(log.rank)
    return log


def _is_problem(line: str) -> bool:
    """A warning or an error of Horovod or NCCL, or a failed connection of Gloo, which logs nothing else."""
    if match := _HOROVOD.match(line):
        return match["level"] in "WEF"
    if match := _NCCL.search(line):
        return match["level"] == "WARN"
    return bool(_GLOO.search(line))


def _first_problem(said: Mapping[str, list[str]]) -> Problem | None:
    """The earliest one; lines without a time come after those with one."""
    problems = [Problem(name=name, text=line) for name, lines in said.items() for line in lines if _is_problem(line)]

    def when(problem: Problem) -> str:
        match = _HOROVOD.match(problem.text)
        return (match and match["time"]) or "~"  # after all digits

    return min(problems, key=when, default=None)


def _rings(lines: Iterable[str]) -> list[list[int]]:
    """The different orders of ranks in NCCL's channels, in the order in which they are logged."""
    texts = dict.fromkeys(" ".join(match["ranks"].split()) for line in lines if (match := _RING.search(line)))
    return [[int(rank) for rank in text.split()] for text in texts]


def _between_hosts(hosts: list[str]) -> int:
    """How many hops of a ring over these hosts lead to another one."""
    return sum(here != there for here, there in zip(hosts, [*hosts[1:], *hosts[:1]], strict=True))


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
