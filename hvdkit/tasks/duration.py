"""How long training takes on this machine's cores, by the model's arithmetic: right to a factor of about two."""

from __future__ import annotations

import functools
import os
import time

_TRAINING = 3  # a step's arithmetic over that of its forward pass
# Of the speed of a product of matrices, what training reaches: 0.29 to 0.61 for ResNet-20 and -18 at 32 to 224 pixels
# under PyTorch, on one core of an Intel Xeon.
_REACHED = 0.4


@functools.cache
def measured_speed() -> float:
    """Floating-point operations a second of this machine's cores in products of matrices, float32.

    It is measured on one core and in CPU time, which other processes hardly change: such small products take one
    thread, and reach the speed of large ones.
    """
    import numpy as np

    left, right = np.ones((32, 64, 64), np.float32), np.ones((64, 64), np.float32)
    best, until = float("inf"), time.perf_counter() + 0.1
    while time.perf_counter() < until:
        began = time.process_time()
        left @ right
        best = min(best, time.process_time() - began)
    return 2 * left.size * 64 / best * len(os.sched_getaffinity(0))


def seconds(multiply_adds: int, trained: float, speed: float, evaluated: float = 0) -> float:
    """Seconds to train on so many samples and to evaluate so many; `multiply_adds` are those of one forward pass."""
    return 2 * multiply_adds * (_TRAINING * trained + evaluated) / (_REACHED * speed)
