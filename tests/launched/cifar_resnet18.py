"""ResNet-18 on CIFAR-10's shapes by hand, in the form of 2023: DistributedOptimizer, fp16 compression, a scaled rate.
There is no data set here: pictures are a class's color and noise.
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--images", type=int, default=64)
parser.add_argument("--base-lr", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


widths = [64, 64, 128, 128, 256, 256, 512, 512]
strides = [1, 1, 2, 1, 2, 1, 2, 1]
blocks = [Block(*sizes) for sizes in zip([64, *widths], widths, strides, strict=False)]
stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).to(device)

labels = torch.arange(args.images) % 10
images = 0.1 * torch.randn(args.images, 3, 32, 32) + F.one_hot(labels, 12).float().view(-1, 3, 4, 1).mean(2, True)
dataset = TensorDataset(images, labels)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9, weight_decay=5e-4)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    schedule.step()
    mean = hvd.allreduce(loss.detach(), name="mean_loss").item()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean:.3f}, learning rate {schedule.get_last_lr()[0]:g}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
if hvd.rank() == 0:
    model.load_state_dict(torch.load("checkpoint.pt")["model"])
print("weights", sum(p.double().abs().sum().item() for p in model.parameters()))
