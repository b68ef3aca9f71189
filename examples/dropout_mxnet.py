"""A model with dropout, on a data set of hvdkit's: the handwritten digits of the recipes.

hvdkit train examples/dropout.yaml -np 2
"""

from mxnet.gluon import nn

import hvdkit


class Dropout(hvdkit.Own):
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
    hvdkit.run_task("mxnet", Dropout)
