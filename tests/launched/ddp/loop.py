"""A loop for DistributedDataParallel, as torchrun starts it: `loop.py WEIGHTS`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
torch.manual_seed(rank)
generator = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(48, 8, generator=generator), torch.randint(3, (48,), generator=generator))
sampler = DistributedSampler(data, size, rank, seed=3)
loader = DataLoader(data, batch_size=6, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch}: loss {float(mean) / size:.6f}")
if rank == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], sys.argv[1])
dist.barrier()
dist.destroy_process_group()
