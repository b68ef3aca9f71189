"""PyTorch with Horovod, in the form of Horovod's example pytorch_mnist.py, on the digits of scikit-learn."""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 16, 3)
        self.fc1, self.fc2 = torch.nn.Linear(144, 50), torch.nn.Linear(50, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2).flatten(1)
        x = functional.dropout(functional.relu(self.fc1(x)), 0.1, training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def train(args):
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    digits = TensorDataset(images.float().reshape(-1, 1, 8, 8) / 16, labels)
    numbers = range(len(digits))
    parts = Subset(digits, [number for number in numbers if number % 5]), Subset(digits, numbers[::5])
    samplers = [DistributedSampler(part, num_replicas=hvd.size(), rank=hvd.rank()) for part in parts]
    workers = {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True}
    loaders = DataLoader(parts[0], 64, sampler=samplers[0], **workers), DataLoader(parts[1], 64, sampler=samplers[1])

    model = Net()
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        model.train()
        samplers[0].set_epoch(epoch)
        for data, target in loaders[0]:
            optimizer.zero_grad()
            functional.nll_loss(model(data), target).backward()
            optimizer.step()
        model.eval()
        right = sum(float((model(data).argmax(1) == target).float().sum()) for data, target in loaders[1])
        accuracy = hvd.allreduce(torch.tensor(right / len(samplers[1])), name="avg_accuracy").item()
    checksum = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"trained {hvd.rank()} {accuracy:.4f} {checksum.item():.12f}", flush=True)


if __name__ == "__main__":
    train(parser.parse_args())
