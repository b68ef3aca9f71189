"""A run without a fault, of which the other scripts are made: a linear classifier of random points."""

import os

import numpy as np
from torch import nn

from hvdkit import run_task
from hvdkit.adapters import pytorch
from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own

RANK = int(os.environ.get("HOROVOD_RANK", "0"))


class Points(Own):
    unit = "points"
    steps = 0  # so far, each with one call of the loss

    def samples(self):
        points = np.random.default_rng(1).standard_normal((2000, 8)).astype("float32")
        return tuple(ArraySplit(part, (part.sum(axis=1) > 0).astype("int64")) for part in (points[200:], points[:200]))

    def model(self):
        return nn.Linear(8, 2)

    def loss(self, outputs, targets):
        self.steps += 1
        self.fault(self.steps)
        return nn.functional.cross_entropy(outputs, targets)

    def fault(self, step):
        """What goes wrong in this step."""


def run(task):
    run_task(pytorch, task)


if __name__ == "__main__":
    run(Points)
