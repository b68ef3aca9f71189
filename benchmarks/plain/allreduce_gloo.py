"""An allreduce of torch.distributed over Gloo, timed as `hvdkit bench` times Horovod's: RANK SIZE STORE BYTES…

Rank 0 prints the median time in microseconds of each size, JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import distributed

rank, size = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
found = {}
for count in [int(text) // 4 for text in sys.argv[4:]]:
    seconds = []
    for _ in range(max(8, min(400, 10**9 // (4 * count) // 8))):
        tensor = torch.full((count,), rank + 1.0)
        distributed.all_reduce(torch.zeros(1))
        began = time.perf_counter()
        distributed.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
        assert tensor[-1].item() == size * (size + 1) / 2
    slowest = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    found[4 * count] = 1e6 * statistics.median(slowest.tolist()[2:])
if rank == 0:
    print(json.dumps(found))
# Both are done before one ends: a process whose Gloo threads still run is aborted by C++ at its end.
distributed.barrier()
distributed.destroy_process_group()
