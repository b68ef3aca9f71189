"""A model with dropout, on a data set of hvdkit's: the handwritten digits of the recipes.

hvdkit train examples/dropout.yaml -np 2
"""

from mxnet.gluon import nn

from hvdkit.adapters import mxnet
from hvdkit.tasks.own import Own
from hvdkit.worker.entry import run_task


class Dropout(Own):
    """A classifier: loss, metrics and `best` are what `Own` has."""

    unit = "images"

    def model(self):
        width, share = self.options["width"], self.options["dropout"]
        model = nn.HybridSequential()
        model.add(
            nn.Flatten(),
            nn.Dense(width, activation="relu", in_units=32 * 32 * 3),
            nn.Dropout(share),  # in training alone
            nn.Dense(self.recipe.model.classes, in_units=width),
        )
        return model


if __name__ == "__main__":
    run_task(mxnet, Dropout)
