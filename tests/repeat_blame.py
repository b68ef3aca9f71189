"""Repeat real failures of real Horovod ranks, and count how often the right rank is named. Run by hand.

usage: python -m tests.repeat_blame N LAUNCHER [FRAMEWORK] [COUNTS.jsonl]

Two ranks reduce; one of them, rank 0 and rank 1 in turn, fails in one of the ways of FAULTS, in turn too; the other
loses it. N repeats under LAUNCHER (direct or horovodrun), AT_ONCE of them at a time, with FRAMEWORK: bare (Horovod
alone, which starts soonest), mxnet or pytorch. Each repeat adds a line to COUNTS.jsonl, and those that are there count:
an interrupted series goes on. The exit status is 1 where a verdict was wrong.
"""

from __future__ import annotations

import collections
import json
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.runtimes.store import find
from tests.launching import PRELUDE

AT_ONCE = 4  # of two ranks each: more than two cores do at once, since a busy machine is part of the point
REDUCE = {
    "bare": """
from tests import bare_horovod as hvd
def reduce():
    hvd.allreduce(1)
""",
    "mxnet": """
import mxnet as mx, horovod.mxnet as hvd
def reduce():
    hvd.allreduce(mx.nd.ones((1,)), name="x").asscalar()
""",
    "pytorch": """
import torch, horovod.torch as hvd
def reduce():
    hvd.allreduce(torch.ones(1), name="x").item()
""",
}
LEAVES_SLOWLY = "import atexit; atexit.register(time.sleep, 1.5)\n"  # behind Horovod's own handler, which comes later
# By name: what the rank runs first, what it does before its first collective, what behind it; how it must be named.
FAULTS: dict[str, tuple[str, str, str, tuple[int | None, str | None]]] = {
    "exits before a collective": ("", "sys.exit(3)", "", (3, None)),
    "exits between collectives": ("", "", "sys.exit(3)", (3, None)),
    "leaves slowly before a collective": (LEAVES_SLOWLY, "sys.exit(3)", "", (3, None)),
    "leaves slowly between collectives": (LEAVES_SLOWLY, "", "sys.exit(3)", (3, None)),
    "raises": ("", "", "raise ValueError('the seventh image is upside down')", (1, None)),
    "raises and leaves slowly": (LEAVES_SLOWLY, "", "raise ValueError('upside down')", (1, None)),
    "leaves at once": ("", "", "os._exit(7)", (7, None)),
    "is killed before a collective": ("", "os.kill(os.getpid(), 9)", "", (None, "SIGKILL")),
    "is killed between collectives": ("", "", "os.kill(os.getpid(), 9)", (None, "SIGKILL")),
    "aborts": ("", "", "os.abort()", (None, "SIGABRT")),
}


def script(framework: str, fault: str, guilty: int) -> str:
    """What each rank runs."""
    first, before, behind, _ = FAULTS[fault]
    lines = [
        PRELUDE,
        f"guilty = rank == {guilty}",
        f"if guilty:\n    {first.strip() or 'pass'}",
        REDUCE[framework],
        "hvd.init()",
        f"if guilty:\n    {before or 'pass'}",
        "reduce()",
        f"if guilty:\n    {behind or 'pass'}",
        "while True:\n    reduce()",
    ]
    return "\n".join(lines)


def repeat(number: int, launcher: str, framework: str) -> dict[str, Any]:
    """One failure, and what was said of it."""
    fault = list(FAULTS)[number % len(FAULTS)]
    guilty = number // len(FAULTS) % 2
    expected = (guilty, *FAULTS[fault][3])
    runtime = find("mxnet" if framework == "bare" else framework)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-c", script(framework, fault, guilty)]
        hosts = parse_hosts(None, 2)
        job = Job(runtime.python, arguments, 2, hosts, dict(runtime.environment), Path(folder) / "logs")
        try:
            LAUNCHERS[launcher].run(job)
            named, said = None, "nothing was wrong"
        except RankFailure as failure:
            named, said = (failure.rank, failure.exit_code, failure.signal), str(failure)
        logs = {path.name: path.read_text(errors="replace")[-3000:] for path in job.log_dir.glob("*.log")}
        ends = json.loads((job.log_dir / "exits.json").read_text())
    right = named == expected
    facts = {"number": number, "fault": fault, "guilty": guilty, "launcher": launcher}
    facts |= {"framework": framework, "right": right}
    seconds = round(time.monotonic() - started, 1)
    return facts | {"seconds": seconds, "said": said, "exits": ends} | ({} if right else {"logs": logs})


def main() -> int:
    """The exit status."""
    count, launcher, framework, *rest = *sys.argv[1:3], *(sys.argv[3:] or ["bare"])
    counts = Path(rest[0] if rest else f"repeat-blame-{launcher}-{framework}.jsonl")
    rows = [json.loads(line) for line in counts.read_text().splitlines()] if counts.exists() else []
    missing = sorted(set(range(int(count))) - {row["number"] for row in rows})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in as_completed([pool.submit(repeat, number, launcher, framework) for number in missing]):
            last = done.result()
            rows.append(last)
            with counts.open("a") as file:
                file.write(json.dumps(last) + "\n")
            verdict = "right" if last["right"] else "WRONG"
            first_line = re.sub(r"; all ranks were ended.*", "", last["said"], flags=re.DOTALL)
            print(
                f"{len(rows)}: {verdict}, {last['seconds']} s: rank {last['guilty']} {last['fault']}: {first_line}",
                flush=True,
            )
    right = collections.Counter(row["fault"] for row in rows if row["right"])
    wrong = collections.Counter(row["fault"] for row in rows if not row["right"])
    for fault in FAULTS:
        print(f"{fault:36} {right[fault]:4} right {wrong[fault]:4} wrong")
    print(f"{launcher}, {framework}: {sum(right.values())} of {len(rows)} verdicts were right")
    return int(bool(wrong))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
