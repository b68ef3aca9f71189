"""Small TensorFlow tasks of one's own, each odd as a public report describes it; the variable KIND names the class."""

import os

import numpy as np
import tensorflow as tf

from hvdkit import run_task
from hvdkit.adapters import tensorflow as adapter
from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own


class Net(tf.Module):
    """Logits of two classes."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.random.stateless_normal((16, 2), (1, 2)), name="w")

    def __call__(self, x, training):
        return x @ self.w


class Task(Own):
    """A classifier of 16 numbers by their first one; nothing is odd."""

    def samples(self):
        made = np.random.default_rng(5)
        x = made.normal(size=(260, 16)).astype("float32")
        y = (x[:, 0] > 0).astype("int64")
        return ArraySplit(x[60:], y[60:]), ArraySplit(x[:60], y[:60])

    def model(self):
        return Net()


class LateVariables(Task):
    """A variable that is created in the first call, beside one that is there before."""

    def model(self):
        class Late(Net):
            scale = None

            def __call__(self, x, training):
                if self.scale is None:
                    self.scale = tf.Variable(1.0, name="scale")
                return super().__call__(x, training) * self.scale

        return Late()


class NoTraining(Task):
    """A module whose call does not take `training`."""

    def model(self):
        class Plain(Net):
            def __call__(self, x):
                return x @ self.w

        return Plain()


class KerasModel(Task):
    """A Keras model under the adapter for tf.Module."""

    def model(self):
        import keras

        return keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(2)])


if __name__ == "__main__":
    kinds = {each.__name__: each for each in [Task, *Task.__subclasses__()]}
    run_task(adapter, kinds[os.environ.get("KIND", "Task")])
