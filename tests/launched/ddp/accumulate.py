"""Accumulation with `no_sync`, bfloat16 by autocast, and clipping, for DistributedDataParallel: `accumulate.py OUT`."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 4

dist.init_process_group(backend="gloo")
torch.set_num_threads(1)
torch.manual_seed(100 + dist.get_rank())
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
for step in range(3):
    for part in range(ACCUMULATE):
        generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
        inputs, labels = torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)
        last = part == ACCUMULATE - 1
        with contextlib.nullcontext() if last else ddp.no_sync(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(ddp(inputs), labels) / ACCUMULATE
            loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], sys.argv[1])
dist.destroy_process_group()
