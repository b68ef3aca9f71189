"""Accumulation, bfloat16 by autocast, and clipping, for Horovod: `accumulate_horovod.py OUT`."""

import sys

import horovod.torch as hvd
import torch
from torch import nn

import hvdkit

ACCUMULATE = 4

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(100 + hvd.rank())
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=ACCUMULATE)
hvdkit.checkpoints("unused", model=model).restore()
for step in range(3):
    for part in range(ACCUMULATE):
        generator = torch.Generator().manual_seed(1000 * step + 10 * part + hvd.rank())
        inputs, labels = torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATE
            loss.backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
if hvd.rank() == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], sys.argv[1])
hvd.shutdown()
