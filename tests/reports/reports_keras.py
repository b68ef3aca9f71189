"""Small Keras tasks of one's own, each odd as a public report describes it; the variable KIND names the class."""

import os

import keras
import numpy as np

from hvdkit import run_task
from hvdkit.adapters import keras as adapter
from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own


class Task(Own):
    """A classifier of 16 numbers by their first one; nothing is odd."""

    def samples(self):
        made = np.random.default_rng(5)
        x = made.normal(size=(260, 16)).astype("float32")
        y = (x[:, 0] > 0).astype("int64")
        return ArraySplit(x[60:], y[60:]), ArraySplit(x[:60], y[:60])

    def model(self):
        layers = [keras.layers.Input((16,)), keras.layers.Dense(8, activation="relu"), *self.middle()]
        return keras.Sequential([*layers, keras.layers.Dense(2, activation=self.activation)])

    activation = None

    def middle(self):
        return []


class Softmax(Task):
    """Probabilities in place of logits, as in most examples of Keras."""

    activation = "softmax"


class Frozen(Task):
    """Batch norm that does not learn, and so uses its running statistics."""

    def middle(self):
        norm = keras.layers.BatchNormalization()
        norm.trainable = False
        return [norm]


class Policy(Task):
    """A script that sets a policy of mixed precision for all layers."""

    def model(self):
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
        return super().model()


class Compiled(Task):
    """A model that is compiled with an optimizer and a loss already."""

    def model(self):
        model = super().model()
        model.compile(optimizer=keras.optimizers.Adam(0.5), loss="mse", metrics=["accuracy"])
        return model


class Unbuilt(Task):
    """A model whose layers have no weights before their first call."""

    def model(self):
        return keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])


class Regularized(Task):
    """A penalty of a layer's own, beside the loss."""

    def middle(self):
        return [keras.layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.1))]


class AlwaysDropout(Task):
    def model(self):
        inputs = keras.layers.Input((16,))
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dropout(0.5)(inputs, training=True)))


if __name__ == "__main__":
    kinds = {each.__name__: each for each in [Task, *Task.__subclasses__()]}
    run_task(adapter, kinds[os.environ.get("KIND", "Task")])
