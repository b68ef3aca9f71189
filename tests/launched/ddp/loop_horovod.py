"""A loop for Horovod, as hvdkit launch starts it: `loop_horovod.py WEIGHTS`."""

import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdkit

hvd.init()
rank, size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
torch.set_num_threads(1)
torch.manual_seed(rank)
generator = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(48, 8, generator=generator), torch.randint(3, (48,), generator=generator))
sampler = DistributedSampler(data, size, rank, seed=3)
loader = DataLoader(data, batch_size=6, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvdkit.checkpoints("unused", model=model).restore()
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    mean = hvdkit.mean({"loss": loss})["loss"] * size
    if rank == 0:
        print(f"epoch {epoch}: loss {float(mean) / size:.6f}")
if rank == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], sys.argv[1])
hvd.shutdown()
