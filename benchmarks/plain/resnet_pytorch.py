"""ResNet-20 on the digits in PyTorch with Horovod, by hand: what hvdkit is measured against.

python benchmarks/plain/resnet_pytorch.py --epochs 2
horovodrun -np 2 python benchmarks/plain/resnet_pytorch.py --epochs 2 --horovod
"""

import shared
import torch
from torch import nn
from torch.nn import functional as F

hvd = shared.horovod("horovod.torch")


def conv(inputs, outputs, kernel, stride):
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, 3, 1), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet20(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 1), nn.BatchNorm2d(16), nn.ReLU())
        widths, strides = [16] * 3 + [32] * 3 + [64] * 3, [1, 1, 1, 2, 1, 1, 2, 1, 1]
        self.blocks = nn.Sequential(*map(Block, [16, *widths], widths, strides))
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def main():
    args = shared.options()
    hvd.init()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    (images, labels), (val_images, val_labels) = shared.digits()
    images, val_images = (torch.from_numpy(x).permute(0, 3, 1, 2).contiguous() for x in (images, val_images))
    labels, val_labels = torch.from_numpy(labels), torch.from_numpy(val_labels)

    model = ResNet20()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def step(indices, rate):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(model(images[indices]), labels[indices]).backward()
        optimizer.step()

    @torch.no_grad()
    def correct(rows):
        model.eval()
        found = (model(val_images[rows]).argmax(1) == val_labels[rows]).sum()
        model.train()
        return found

    shared.train(args, hvd, step, correct, sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main()
