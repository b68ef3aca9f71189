"""A rank of `ways.py`: recipes that add up by several ways take turns (`turns.py`), and bytes are counted.

python ways_rank.py PLAN.json FRAMEWORK
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from turns import meet, opened

from hvdkit import adapters
from hvdkit.core.heartbeat import Heartbeat
from hvdkit.core.usage import Snapshot, load_of_others
from hvdkit.files import write_atomic
from hvdkit.worker.entry import end_as_rank


def sent_bytes() -> int:
    """What this host has sent over its link."""
    # Not in /sys, which shows the namespace of whoever has mounted it.
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    name = os.environ["HOROVOD_GLOO_IFACE"] + ":"
    return int(next(line for line in lines if line.strip().startswith(name)).split(":")[1].split()[8])


def take_turns(heartbeat: Heartbeat) -> None:
    """Rank 0 writes, by round and way, the steps of all ranks and what each host has sent for the turn."""
    plan, adapter = json.loads(Path(sys.argv[1]).read_text()), adapters.load(sys.argv[2])
    topology, dataset, sides = opened(adapter, plan, heartbeat)
    begun, mine = Snapshot.take(time.process_time()), []
    for order in plan["rounds"]:
        seconds, sent = {}, {}
        for way in order:
            meet(adapter)
            before = sent_bytes()
            seconds[way] = sides[way].turn(adapter, topology, dataset, heartbeat)
            meet(adapter)
            sent[way] = sent_bytes() - before
        mine.append({"seconds": seconds, "sent": sent})
    told = {"host": os.environ["HOROVOD_HOSTNAME"], "rounds": mine}
    everyone = adapter.allgather_object(told | {"used": Snapshot.take(time.process_time()).since(begun)}, name="turns")
    if topology.is_root:
        found = {
            "versions": adapter.versions(),
            "load": load_of_others([rank["used"] for rank in everyone]),
            "rounds": [
                {
                    "seconds": {way: [rank["rounds"][number]["seconds"][way] for rank in everyone] for way in order},
                    # Ranks of a host read the same counter.
                    "sent_bytes": {
                        way: {rank["host"]: rank["rounds"][number]["sent"][way] for rank in everyone} for way in order
                    },
                }
                for number, order in enumerate(plan["rounds"])
            ],
        }
        write_atomic(Path(plan["out"]), json.dumps(found) + "\n")
    adapter.shutdown()


if __name__ == "__main__":
    end_as_rank(take_turns)
