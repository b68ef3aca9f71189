"""PyTorch with Horovod, in the steps of https://horovod.readthedocs.io/en/stable/pytorch.html."""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits

# Initialize Horovod, and pin a GPU to this process, where there is one.
hvd.init()
torch.manual_seed(hvd.rank())
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())

# Partition the data among the ranks.
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
dataset = torch.utils.data.TensorDataset(images.float() / 16, labels)
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)

# Scale the learning rate, wrap the optimizer, and start all ranks from rank 0's state.
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(8):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()

right = (model(images.float() / 16).argmax(1) == labels).float().mean()
checksum = sum(parameter.double().sum() for parameter in model.parameters())
if hvd.rank() == 0:
    torch.save(model.state_dict(), "checkpoint")
print(f"trained {hvd.rank()} {hvd.allreduce(right).item():.4f} {checksum.item():.12f}", flush=True)
