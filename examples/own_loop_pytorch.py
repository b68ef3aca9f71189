"""A training loop of your own under plain Horovod; four functions of hvdkit do what each such script writes by hand.

hvdkit launch -np 2 examples/own_loop_pytorch.py runs/own-loop     # again: it continues from its newest checkpoint
"""

import sys

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit

hvd.init()
torch.set_num_threads(1)
pixels, labels = (torch.from_numpy(values) for values in load_digits(return_X_y=True))
data = TensorDataset(pixels.float() / 16, labels)
train = hvdkit.shard(torch.utils.data.Subset(data, range(360, len(data))))  # this rank's part
test = hvdkit.shard(torch.utils.data.Subset(data, range(360)), even=False)  # all samples, once

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
kept = hvdkit.checkpoints(sys.argv[1], model=model, optimizer=optimizer)
first = kept.restore().get("epoch", 0)  # of the newest checkpoint, or rank 0's weights for all
step = first * (len(train) // 32)

for epoch in range(first, 6):
    torch.manual_seed(epoch)  # the order of the samples
    for inputs, targets in DataLoader(train, batch_size=32, shuffle=True, drop_last=True):
        for group in optimizer.param_groups:
            group["lr"] = hvdkit.scaled(0.05, step, warmup_steps=20)  # × the number of ranks
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        step += 1
    with torch.no_grad():
        outputs, targets = model(torch.stack([x for x, _ in test])), torch.stack([y for _, y in test])
    means = hvdkit.mean({"accuracy": (outputs.argmax(1) == targets).float().mean()}, count=len(test))  # of all ranks
    kept.save(epoch=epoch + 1)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: accuracy {means['accuracy']:.4f}", flush=True)
