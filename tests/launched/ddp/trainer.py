"""A Trainer class with snapshots, as PyTorch's tutorial on fault tolerance has it: `trainer.py WEIGHTS`."""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.sin(torch.arange(10) * (index + 1) / 7)
        return x, x.sum(0, keepdim=True)


class Trainer:
    def __init__(self, model, data, optimizer, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.snapshot_path = snapshot_path
        self.first = 0
        if Path(snapshot_path).exists():
            self.load_snapshot()
        self.model = DDP(self.model)

    def load_snapshot(self):
        snapshot = torch.load(self.snapshot_path)
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.first = snapshot["epoch"]

    def save_snapshot(self, epoch):
        snapshot = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        torch.save(snapshot, self.snapshot_path)

    def train(self, epochs):
        for epoch in range(self.first, epochs):
            self.data.sampler.set_epoch(epoch)
            for inputs, targets in self.data:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(inputs), targets).backward()
                self.optimizer.step()
            if self.rank == 0:
                self.save_snapshot(epoch + 1)


def main(weights):
    init_process_group(backend="gloo")
    torch.set_num_threads(1)
    torch.manual_seed(5)
    for epochs in (2, 4):  # the second goes on from the first's snapshot
        model = torch.nn.Linear(10, 1)
        data = Waves()
        loader = DataLoader(data, batch_size=5, shuffle=False, sampler=DistributedSampler(data))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        trainer = Trainer(model, loader, optimizer, weights + ".snapshot")
        trainer.train(epochs)
        barrier()  # no rank looks for a snapshot that rank 0 still writes
    assert trainer.first == 2
    if trainer.rank == 0:
        torch.save([parameter.detach() for parameter in model.parameters()], weights)
    destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
