"""Sums of float16 over Gloo, right where the released Gloo leaves some unassigned (hvdkit/runtimes/patches)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.launching import framework_job

# Rank 0 has every positive finite float16, rank 1 what makes the sum the float16 nearest to the first one's own bits,
# taken as a number. As released, Gloo then left the first one where the sum belongs.
RANK = """
import sys
import numpy as np
from hvdkit import adapters
from hvdkit.core.group import world_of
adapter = adapters.load(sys.argv[1])
topology = adapter.init("cpu")
rank, world = topology.rank, world_of(topology)
small = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)
wanted = small.view(np.uint16).astype(np.float16)
rest = (wanted.astype(np.float32) - small.astype(np.float32)).astype(np.float16)
mine = adapter.from_numpy(rest if rank else small)
(total,) = adapter.allreduce([mine], world, "sum", "halves")
right = (small.astype(np.float32) + rest.astype(np.float32)).astype(np.float16)
wrong = np.flatnonzero(adapter.to_numpy(total) != right)
print("wrong", wrong.size, "of", small.size, [(float(small[at]), float(rest[at])) for at in wrong[:3]])
adapter.shutdown()
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("framework", "shared_memory"), [("pytorch", "0"), ("mxnet", "1")])
def test_sums_of_float16_are_right_for_every_number(tmp_path: Path, framework: str, shared_memory: str) -> None:
    (tmp_path / "halves.py").write_text(RANK)
    job = framework_job(framework, tmp_path, tmp_path / "halves.py", framework, HOROVOD_SHARED_MEMORY=shared_memory)
    direct.run(job)
    for rank in range(2):
        told = [line for line in job.log(rank).read_text().splitlines() if line.startswith("wrong")]
        assert [line.split()[:4] for line in told] == [["wrong", "0", "of", "31743"]], told
