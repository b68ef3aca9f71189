"""A rank of `own_hosts.py`: the methods take turns (`turns.py`), and their steps are told.

python own_hosts_rank.py PLAN.json FRAMEWORK
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from turns import opened

from hvdkit import adapters
from hvdkit.core.heartbeat import Heartbeat
from hvdkit.core.usage import Snapshot, load_of_others
from hvdkit.files import write_atomic
from hvdkit.worker.entry import end_as_rank


def take_turns(heartbeat: Heartbeat) -> None:
    """Rank 0 writes, by round and side, the steps of all ranks, and what share of the machine others took."""
    plan, adapter = json.loads(Path(sys.argv[1]).read_text()), adapters.load(sys.argv[2])
    topology, dataset, sides = opened(adapter, plan, heartbeat)
    begun, rounds = Snapshot.take(time.process_time()), []
    for order in plan["rounds"]:
        rounds.append([sides[label].turn(adapter, topology, dataset, heartbeat) for label in order])
    mine = {"rounds": rounds, "used": Snapshot.take(time.process_time()).since(begun)}
    everyone = adapter.allgather_object(mine, name="turns")
    if topology.is_root:
        found = {
            "versions": adapter.versions(),
            "load": load_of_others([rank["used"] for rank in everyone]),
            "rounds": [
                [(label, [rank["rounds"][number][turn] for rank in everyone]) for turn, label in enumerate(order)]
                for number, order in enumerate(plan["rounds"])
            ],
        }
        write_atomic(Path(plan["out"]), json.dumps(found) + "\n")
    adapter.shutdown()


if __name__ == "__main__":
    end_as_rank(take_turns)
