"""Your own data pipeline, a torch DataLoader, instead of hvdkit's:

hvdkit train resnet20-digits --framework pytorch -np 2 'data={name: native, module: examples/native_pytorch.py}'
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdkit

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def open_pipeline(job: hvdkit.NativeJob) -> hvdkit.NativePipeline:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 16
    images = torch.nn.functional.interpolate(images, size=32)
    labels = torch.tensor(digits.target)
    train, val = TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])
    rank, size = job.topology.rank, job.topology.size
    sampler = DistributedSampler(train, size, rank, seed=job.seed, drop_last=True)
    workers = int(job.options.get("workers", 0))
    shuffled = DataLoader(train, job.batch_size, sampler=sampler, num_workers=workers, drop_last=True)
    share = DataLoader(torch.utils.data.Subset(val, range(rank, len(val), size)), job.batch_size)

    def batches(loader: DataLoader) -> Batches:
        for x, y in loader:
            yield x.permute(0, 2, 3, 1), y  # height, width, channels; not copied

    def epoch(number: int) -> Batches:
        sampler.set_epoch(number)
        return batches(shuffled)

    return hvdkit.NativePipeline((32, 32, 3), epoch, len(train), lambda: batches(share))
