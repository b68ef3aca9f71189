"""A Trainer class with snapshots for Horovod: `trainer_horovod.py OUT`."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hvdkit


class Waves(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.sin(torch.arange(10) * (index + 1) / 7)
        return x, x.sum(0, keepdim=True)


class Trainer:
    def __init__(self, model, data, optimizer, snapshot_path):
        self.rank = hvd.rank()
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.kept = hvdkit.checkpoints(snapshot_path, model=model, optimizer=optimizer)
        self.first = self.kept.restore().get("epoch", 0)

    def train(self, epochs):
        for epoch in range(self.first, epochs):
            self.data.sampler.set_epoch(epoch)
            for inputs, targets in self.data:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(inputs), targets).backward()
                self.optimizer.step()
            self.kept.save(epoch=epoch + 1)


def main(weights):
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    for epochs in (2, 4):  # the second goes on from the first's snapshot
        model = torch.nn.Linear(10, 1)
        data = Waves()
        loader = DataLoader(data, batch_size=5, shuffle=False, sampler=DistributedSampler(data, hvd.size(), hvd.rank()))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        trainer = Trainer(model, loader, optimizer, weights + ".snapshot")
        trainer.train(epochs)
    assert trainer.first == 2
    if trainer.rank == 0:
        torch.save([parameter.detach() for parameter in model.parameters()], weights)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
