"""A regression of your own: progression of diabetes from ten measurements (scikit-learn's diabetes data).

hvdkit train examples/regression.yaml -np 2
"""

import numpy as np
from sklearn.datasets import load_diabetes
from torch import nn

from hvdkit.adapters import pytorch
from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Metrics
from hvdkit.worker.entry import run_task


def absolute(outputs: np.ndarray, targets: np.ndarray) -> tuple[float]:
    return (float(abs(outputs - targets).sum()),)


class Diabetes(Own):
    unit, metrics, best = "patients", Metrics(("absolute_error",), absolute), "-absolute_error"

    def samples(self):
        inputs, targets = load_diabetes(return_X_y=True)
        inputs, targets = (20 * inputs).astype("float32"), targets[:, None] / 100
        return ArraySplit(inputs[100:], targets[100:]), ArraySplit(inputs[:100], targets[:100])

    def model(self):
        width = self.options.get("width", 16)
        return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)


if __name__ == "__main__":
    run_task(pytorch, Diabetes)
