"""One rank: what core counts as sent, beside what the interface has carried.

python tests/hosts/wire_bytes.py            as a rank: rank 0 writes both, by method, to WIRE_ROWS
python tests/hosts/wire_bytes.py FRAMEWORK  starts three ranks, in a network namespace without other traffic
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CALLS, SHAPE = 8, (50, 20_000)
# so much is sent that what Horovod says about what is ready is little beside it
SETTINGS = {"topk": {"ratio": 0.1}, "powersgd": {"rank": 16}}


def rank(framework: str) -> None:
    import numpy as np

    from hvdkit import adapters
    from hvdkit.core.group import Mesh, world_of
    from hvdkit.recipe.communication import METHODS
    from hvdkit.strategies.reducer import Reducer
    from hvdkit.strategies.transports import TRANSPORTS

    def carried() -> int:
        adapter.allgather_object(None, world_of(topology), name="quiet")
        # not in /sys, which shows the namespace of whoever mounted it
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])

    adapter = adapters.load(framework)
    topology = adapter.init("cpu")
    values = np.random.default_rng(topology.rank).standard_normal(SHAPE).astype(np.float32)
    vector, shapes = adapter.from_numpy(values.reshape(-1)), {"weight": SHAPE}
    rows = []
    for name, (way, method) in {**{name: ("ring", name) for name in METHODS}, "central": ("central", "none")}.items():
        settings = METHODS[method](**SETTINGS.get(method, {}))
        reducer = Reducer(TRANSPORTS[way](adapter, Mesh(topology), f"wire.{name}"), settings)
        adapter.to_numpy(reducer.packed(vector, shapes))  # Horovod negotiates the names in full once
        before, counted = carried(), reducer.transport.sent
        for _ in range(CALLS):
            adapter.to_numpy(reducer.packed(vector, shapes))
        sent = sum(adapter.allgather_object(reducer.transport.sent - counted, world_of(topology), name="sent"))
        if way == "central":  # what is counted is the busiest rank's: the others send one vector each
            sent = sent / topology.size * 2
        measured = carried() - before
        if topology.is_root:
            rows.append([name, sent, measured])
    if topology.is_root:  # to a file: a rank's output may hold a framework's words too, in the midst of a line
        Path(os.environ["WIRE_ROWS"]).write_text(json.dumps(rows))
    adapter.shutdown()


def main(framework: str) -> None:
    from hvdkit.launch.hosts import Host
    from hvdkit.launch.job import Job
    from hvdkit.launch.launchers import LAUNCHERS
    from hvdkit.runtimes.store import find

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    runtime = find(framework)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        job = Job(
            python=runtime.python,
            arguments=[__file__],
            np=3,
            hosts=[Host("localhost", 3)],
            # While a rank waits for the others, Horovod asks all of them each cycle: on a loaded machine cycles of 1 ms
            # would be a part of what is measured.
            environment=runtime.environment
            | {"HOROVOD_CYCLE_TIME": "20", "OMP_NUM_THREADS": "1", "WIRE_FRAMEWORK": framework, "WIRE_ROWS": str(rows)},
            log_dir=Path(folder) / "logs",
        )
        LAUNCHERS["direct"].run(job)
        sys.stdout.write(rows.read_text() + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        rank(os.environ["WIRE_FRAMEWORK"])
