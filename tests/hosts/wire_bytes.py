"""One rank: what core counts as sent, beside what the interface has carried.

python tests/hosts/wire_bytes.py            as a rank: rank 0 prints both by method
python tests/hosts/wire_bytes.py FRAMEWORK  starts three ranks, in a network namespace that has nothing else
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CALLS, ELEMENTS = 8, 400_000


def rank(framework: str) -> None:
    import numpy as np

    from hvdkit import adapters
    from hvdkit.communication import METHODS
    from hvdkit.core.reducer import Reducer
    from hvdkit.core.transport import TRANSPORTS

    def carried() -> int:
        adapter.allgather_object(None, name="quiet")
        return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())

    adapter = adapters.load(framework)
    topology = adapter.init("cpu")
    values = np.random.default_rng(topology.rank).standard_normal((500, ELEMENTS // 500)).astype(np.float32)
    tensors = {"weight": adapter.from_numpy(values)}
    for name, (way, method) in {**{name: ("ring", name) for name in METHODS}, "central": ("central", "none")}.items():
        reducer = Reducer(TRANSPORTS[way](adapter, topology, f"wire.{name}"), METHODS[method]())
        adapter.to_numpy(reducer(tensors)["weight"])  # Horovod makes friends with the names
        before, counted = carried(), reducer.transport.sent
        for _ in range(CALLS):
            adapter.to_numpy(reducer(tensors)["weight"])
        sent = sum(adapter.allgather_object(reducer.transport.sent - counted, name="sent"))
        if way == "central":  # what is counted is the busiest rank's: the others send one vector each
            sent = sent / topology.size * 2
        measured = carried() - before
        if topology.is_root:
            sys.stdout.write(json.dumps([name, sent, measured]) + "\n")
            sys.stdout.flush()
    adapter.shutdown()


def main(framework: str) -> None:
    from hvdkit.launch import LAUNCHERS
    from hvdkit.launch.hosts import Host
    from hvdkit.launch.job import Job
    from hvdkit.runtimes.store import find

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    runtime = find(framework)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            python=runtime.python,
            arguments=[__file__],
            np=3,
            hosts=[Host("localhost", 3)],
            environment=runtime.environment | {"OMP_NUM_THREADS": "1", "WIRE_FRAMEWORK": framework},
            log_dir=Path(folder),
        )
        LAUNCHERS["direct"](job)
        for log in sorted(Path(folder).glob("*")):
            if log.is_file():
                sys.stdout.write("".join(line + "\n" for line in log.read_text().splitlines() if line.startswith("[")))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        rank(os.environ["WIRE_FRAMEWORK"])
