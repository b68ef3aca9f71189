"""Horovod's reduce-scatter over Gloo on three ranks, for which Horovod is patched (hvdkit/runtimes/patches)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.launch.launchers import direct
from tests.launching import framework_job

# Values are small integers, so that sums are exact in every type, whatever their order.
RANK = """
import numpy as np
import torch
import horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()

def drawn(rows, of, kind):
    return torch.from_numpy(np.random.default_rng([rows, of]).integers(-8, 9, (rows, 2))).to(kind)

def share(rows, kind):
    total = sum(drawn(rows, of, torch.int64) for of in range(size))
    return torch.from_numpy(np.array_split(total.numpy(), size)[rank]).to(kind)

done = 0
# Fewer rows than ranks, uneven shares, shares of several segments of 1 MiB.
for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32):
    for rows in (1, 2, 3, 7, 1_000, 1_000_001 if kind == torch.float32 else 99_998):
        mine, name = drawn(rows, rank, kind), f"{kind}.{rows}"
        kept = mine.clone()
        assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum, name=name), share(rows, kind)), name
        halves = hvd.reducescatter(mine, op=hvd.Sum, name=f"{name}.scaled", prescale_factor=2.0)
        assert torch.equal(halves, 2 * share(rows, kind)), name
        both = hvd.grouped_reducescatter([mine, mine.flip(1)], op=hvd.Sum, name=f"{name}.fused")
        assert torch.equal(both[0], share(rows, kind)) and torch.equal(both[1], share(rows, kind).flip(1)), name
        assert torch.equal(mine, kept), f"{name}: the input has changed"
        done += 1

# Additions are in the order of an allreduce, whose chunks are the same where they divide the tensor.
mine = torch.from_numpy(np.random.default_rng(rank).standard_normal(6 * 1_000)).float()
total = hvd.allreduce(mine, op=hvd.Sum, name="whole")
assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum, name="part"), total.chunk(size)[rank])
print("right", done)
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(120)
def test_each_rank_gets_its_share_of_the_sum(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    job = framework_job("pytorch", tmp_path, tmp_path / "rank.py", np=3, HOROVOD_SHARED_MEMORY="0")
    direct.run(job)
    for rank in range(3):
        assert job.log(rank).read_text().splitlines()[-1] == "right 30"
