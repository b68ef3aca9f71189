"""Small tasks of one's own, each odd as a public report describes it; the variable KIND names the class.

tests/reports/README.md has the reports, and what is expected of each.
"""

import os
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hvdkit import run_task
from hvdkit.adapters import pytorch as adapter
from hvdkit.data.batches import ArraySplit
from hvdkit.data.dataset import Batch
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Metrics


class Task(Own):
    """A classifier of 16 numbers by their first one; nothing is odd."""

    rows = 260

    def samples(self):
        made = np.random.default_rng(5)
        x = made.normal(size=(self.rows, 16)).astype("float32")
        y = (x[:, 0] > 0).astype("int64")
        return ArraySplit(x[60:], y[60:]), ArraySplit(x[:60], y[:60])

    def model(self):
        return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))


class Frozen(Task):
    """Batch norm that is kept in evaluation mode, as for fine-tuning with few samples."""

    def model(self):
        norm = nn.BatchNorm1d(8).eval()
        for each in norm.parameters():
            each.requires_grad_(False)
        return nn.Sequential(nn.Linear(16, 8), norm, nn.ReLU(), nn.Linear(8, 2))


def net(forward, **layers):
    """A module with a head of two logits beside the layers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 2)
            for name, layer in layers.items():
                setattr(self, name, layer)

    Net.forward = forward
    return Net()


class Softmax(Task):
    def model(self):
        return nn.Sequential(super().model(), nn.Softmax(dim=-1))


class LogSoftmax(Task):
    def model(self):
        return nn.Sequential(super().model(), nn.LogSoftmax(dim=-1))


class PlainList(Task):
    """Layers in a Python list, which PyTorch does not register."""

    def model(self):
        def forward(net, x):
            for layer in net.layers:
                x = layer(x).relu()
            return net.head(x)

        return net(forward, layers=[nn.Linear(16, 16), nn.Linear(16, 16)])


def auc(outputs, targets):
    """The area under the ROC curve of a batch, times its size, as if it were a mean over samples."""
    scores = outputs[:, 1] - outputs[:, 0]
    positive, negative = scores[targets == 1], scores[targets == 0]
    if not len(positive) or not len(negative):
        return (0.5 * len(targets),)
    return (float((positive[:, None] > negative[None]).mean()) * len(targets),)


class Auc(Task):
    metrics, best = Metrics(("auc",), auc), "auc"


class Tied(Task):
    """A table that is also the head."""

    def model(self):
        first, last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        last.weight = first.weight
        return net(lambda net, x: net.head(net.last(net.first(x).relu())), first=first, last=last)


class AlwaysDropout(Task):
    def model(self):
        return net(lambda net, x: net.head(functional.dropout(x, 0.5)))


class Noisy(ArraySplit):
    """Augments by NumPy's global generator, as many data sets do."""

    def batch(self, indices):
        batch = super().batch(indices)
        return Batch(batch.inputs + np.random.normal(0, 0.1, batch.inputs.shape).astype("float32"), batch.targets)


class Augmented(Task):
    def samples(self):
        train, val = super().samples()
        return Noisy(train.inputs, train.targets), val


class FromOne(Task):
    """Labels 1 and 2 for two classes."""

    def samples(self):
        train, val = super().samples()
        return ArraySplit(train.inputs, train.targets + 1), ArraySplit(val.inputs, val.targets + 1)


class FloatSums(Task):
    """A metric of NumPy's float32."""

    metrics = Metrics(("right",), lambda outputs, targets: ((outputs.argmax(1) == targets).astype("float32").sum(),))
    best = "right"


class DefaultDouble(Task):
    """An import that changes PyTorch's default dtype, as some libraries do."""

    def model(self):
        torch.set_default_dtype(torch.float64)
        return super().model()


class NoStatistics(Task):
    """Batch norm without running statistics: an output depends on the other samples of the batch."""

    def model(self):
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2))


class Dictionary(Task):
    """A model that returns a dictionary, as Hugging Face's do."""

    def model(self):
        return net(lambda net, x: {"logits": net.head(x)})


class Parallel(Task):
    """A model that is wrapped for another kind of training already."""

    def model(self):
        return nn.DataParallel(super().model())


class MapDataset(Task):
    """PyTorch's data sets in place of splits."""

    def samples(self):
        train, val = super().samples()
        return tuple(
            torch.utils.data.TensorDataset(torch.from_numpy(each.inputs), torch.from_numpy(each.targets))
            for each in (train, val)
        )


class Words(Task):
    """Labels that are text."""

    def samples(self):
        train, val = super().samples()
        names = np.array(["cat", "dog"])
        return ArraySplit(train.inputs, names[train.targets]), ArraySplit(val.inputs, names[val.targets])


class View(ArraySplit):
    """Returns views of its arrays, whose memory a model may change."""

    def batch(self, indices):
        start = int(indices.min())
        return Batch(self.inputs[start : start + len(indices)], self.targets[start : start + len(indices)])


class InPlace(Task):
    """A model that normalizes its inputs in place."""

    def samples(self):
        train, val = super().samples()
        self.val = View(val.inputs.copy(), val.targets)
        self.before = self.val.inputs.copy()
        return View(train.inputs.copy(), train.targets), self.val

    def model(self):
        return net(lambda net, x: net.head(x.mul_(0.5)))

    metrics = Metrics(("size",), lambda outputs, targets: (float(abs(outputs).sum()),))
    best = "size"


class RootOfZero(Task):
    """A finite loss whose gradient is not: the norm of differences that are zero."""

    def model(self):
        return net(lambda net, x: net.head(x) + ((net.head.weight * 0) ** 2).sum().sqrt())


class Unused(Task):
    """A layer that no sample uses: weight decay changes it all the same."""

    def model(self):
        return net(lambda net, x: net.head(x), idle=nn.Linear(16, 2))


class SumLoss(Task):
    """A loss that is a sum over the batch, so that its gradient grows with the batch."""

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="sum")


class NotANumber(Task):
    """One sample that is NaN."""

    def samples(self):
        train, val = super().samples()
        train.inputs[17, 3] = np.nan
        return train, val


class Warned(Task):
    """A script that turns warnings into errors."""

    def model(self):
        warnings.simplefilter("error")
        return super().model()


if __name__ == "__main__":
    kinds = {each.__name__: each for each in [Task, *Task.__subclasses__()]}
    run_task(adapter, kinds[os.environ.get("KIND", "Task")])
