"""A regression of your own: progression of diabetes from ten measurements (scikit-learn's diabetes data).

hvdkit train examples/regression.yaml -np 2
"""

import numpy as np
from sklearn.datasets import load_diabetes
from torch import nn

import hvdkit


def absolute(outputs: np.ndarray, targets: np.ndarray) -> tuple[float]:
    return (float(abs(outputs - targets).sum()),)


class Diabetes(hvdkit.Own):
    unit, metrics, best = "patients", hvdkit.Metrics(("absolute_error",), absolute), "-absolute_error"

    def samples(self):
        inputs, targets = load_diabetes(return_X_y=True)
        inputs, targets = (20 * inputs).astype("float32"), targets[:, None] / 100
        train = hvdkit.ArraySplit(inputs[100:], targets[100:])
        return train, hvdkit.ArraySplit(inputs[:100], targets[:100])

    def model(self):
        width = self.options.get("width", 16)
        return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)


if __name__ == "__main__":
    hvdkit.run_task("pytorch", Diabetes)
