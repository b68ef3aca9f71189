"""A model with two inputs: do two handwritten digits show the same number?

hvdkit train examples/pairs.yaml -np 2
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdkit


def right(outputs: np.ndarray, targets: np.ndarray) -> tuple[float]:
    return (float(((outputs > 0) == (targets > 0.5)).sum()),)


def pairs(images: np.ndarray, digits: np.ndarray, count: int, seed: int) -> hvdkit.ArraySplit:
    """Random pairs, half of them of the same digit; targets (n, 1) are 1 for these and else 0."""
    random = np.random.default_rng(seed)
    left = random.integers(0, len(images), count)
    right = random.integers(0, len(images), count)
    for place in range(0, count, 2):
        right[place] = random.choice(np.flatnonzero(digits == digits[left[place]]))
    same = (digits[left] == digits[right]).astype("float32")[:, None]
    return hvdkit.ArraySplit((images[left], images[right]), same)


class Pairs(hvdkit.Own):
    unit, metrics = "pairs", hvdkit.Metrics(("accuracy",), right)

    def samples(self):
        found = load_digits()
        images, digits = (found.data / 16).astype("float32"), found.target
        return pairs(images[360:], digits[360:], 4000, seed=1), pairs(images[:360], digits[:360], 800, seed=2)

    def model(self):
        encoder = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(self.options["width"])])
        left, right = keras.Input((64,)), keras.Input((64,))
        difference = keras.layers.Subtract()([encoder(left), encoder(right)])
        hidden = keras.layers.Dense(32, "relu")(keras.ops.square(difference))
        return keras.Model([left, right], keras.layers.Dense(1)(hidden))

    def loss(self, outputs, targets):
        return keras.ops.mean(keras.losses.binary_crossentropy(targets, outputs, from_logits=True))


if __name__ == "__main__":
    hvdkit.run_task("keras", Pairs)
