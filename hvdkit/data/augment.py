"""Random augmentation of training images, which depends only on (seed, epoch, sample).

So every framework gets the same bytes, for any number of ranks and in any order of the samples.
"""

from __future__ import annotations

import numpy as np

PADDING = 4  # pixels of zeros on each side, before a crop of the old size (He et al. 2016, section 4.2)
_GAMMA, _MASK = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF


def augment(images: np.ndarray, how: str, seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """`images` (n, height, width, channels), augmented as the recipe's `data.augment` says; the input is not changed.

    `samples` (n,) are the indices of the images in the data set.
    """
    if how == "none":
        return images
    numbers = random_bits(seed, epoch, samples)
    images = shifted(images, numbers)
    if how == "crop-flip":
        flip = (numbers >> np.uint64(32) & np.uint64(1)).astype(bool)
        images[flip] = images[flip, :, ::-1]
    return images


def random_bits(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """64 random bits for each sample, (n,) uint64.

    The finalizer of SplitMix64 (Steele et al. 2014, figure 17), applied to the three numbers in turn.
    """
    state = _mixed(np.array([seed], np.uint64))
    state = _mixed(state ^ np.array([epoch], np.uint64))
    return _mixed(state ^ samples.astype(np.uint64))


def shifted(images: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Each image shifted by up to PADDING pixels vertically and horizontally, filled up with zeros.

    `images` have shape (n, height, width, channels), the random `numbers` (n,) uint64.
    """
    count, height, width, _ = images.shape
    span = np.uint64(2 * PADDING + 1)
    top, left = (numbers % span).astype(int), (numbers >> np.uint64(16)) % span
    padded = np.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    rows = top[:, None] + np.arange(height)
    columns = left.astype(int)[:, None] + np.arange(width)
    moved: np.ndarray = padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved


class RandomStream:
    """SplitMix64 (Steele et al. 2014, figure 17) from a 64-bit state: more random numbers for one sample."""

    def __init__(self, state: int) -> None:
        self._state = state

    def next(self) -> int:
        """64 random bits."""
        # As _mixed, on Python's integers: for a single number NumPy takes ten times as long.
        self._state = self._state + _GAMMA & _MASK
        number = self._state
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
        return number ^ number >> 31

    def uniform(self, low: float, high: float) -> float:
        """A number from `low` to below `high`, from the upper 53 bits."""
        return low + (high - low) * ((self.next() >> 11) * 2.0**-53)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """The output of SplitMix64 from each state, (n,) uint64."""
    numbers = numbers + np.uint64(_GAMMA)  # arrays of uint64 wrap around without a warning
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ numbers >> np.uint64(31))
